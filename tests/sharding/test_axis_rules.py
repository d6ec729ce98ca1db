"""Logical axis rules to roles of mesh axes.

`CUSTOM` restates rules of MaxText's src/maxtext/configs/custom_mesh_and_rule in August 2026 (commit
e591f30). `logical_to_mesh_axes` of Flax, which MaxText calls, says what they mean.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from maxtext_rules import AXES, MAXTEXT, OF_KERNEL, ROLE, mesh_of, roles

from jaxppo import Head, log_probs_from_hidden
from sharding import ParallelMesh

# name: (mesh axes, rules); the rules name axes that the mesh lacks, too
CUSTOM = {
    "cp-as-ep": (
        ["data", "stage", "fsdp", "context", "expert"],
        [
            ["activation_embed_and_logits_batch", ["data", "stage", "fsdp", "expert"]],
            ["vocab", []],
            ["embed_vocab", ["fsdp", "context", "expert"]],
            ["activation_length", ["context"]],
        ],
        {
            "data": ("data", "stage", "fsdp", "expert"),
            "context": ("context",),
            "fsdp": ("fsdp", "context", "expert"),
        },
    ),
    "ep-as-cp": (
        ["data", "stage", "fsdp", "expert"],
        [
            ["activation_embed_and_logits_batch", ["data", "stage", "fsdp"]],
            ["vocab", []],
            ["embed_vocab", ["fsdp", "expert"]],
            ["activation_length", ["expert"]],
        ],
        {"data": ("data", "stage", "fsdp"), "context": ("expert",), "fsdp": ("fsdp", "expert")},
    ),
    "ep-as-dp": (
        ["data", "fsdp", "fsdp_transpose", "expert"],
        [
            ["activation_embed_and_logits_batch", ["data", "fsdp", "fsdp_transpose", "expert"]],
            ["vocab", []],
            ["embed_vocab", ["fsdp", "fsdp_transpose"]],
            ["activation_length_attn", ["context"]],
            ["activation_embed_attn", ["tensor", "tensor_transpose"]],
            ["activation_length", []],
        ],
        {"data": ("data", "fsdp", "fsdp_transpose", "expert"), "fsdp": ("fsdp", "fsdp_transpose")},
    ),
    "pipeline-large-moe": (
        ["data", "stage", "fsdp", "context", "tensor", "expert"],
        [
            ["activation_batch", ["data", "fsdp", "expert"]],
            ["activation_embed_and_logits_batch", ["data", "stage", "fsdp", "expert"]],
            ["activation_length", ["context"]],
            ["vocab", ["tensor"]],
            ["embed", ["fsdp", "expert"]],
            ["embed_vocab", ["fsdp", "expert"]],
        ],
        {
            "data": ("data", "stage", "fsdp", "expert"),
            "context": ("context",),
            "tensor": ("tensor",),
            "fsdp": ("fsdp", "expert"),
        },
    ),
    "pure-fsdp": (
        ["fsdp"],
        [
            ["activation_batch", ["fsdp"]],
            ["activation_embed_and_logits_batch", ["fsdp"]],
            ["embed_vocab", ["fsdp"]],
        ],
        {"data": ("fsdp",), "fsdp": ("fsdp",)},
    ),
}


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_of_maxtext_has_its_role_or_is_named(axis):
    mesh = mesh_of(AXES, **{axis: 2})
    if axis not in ROLE:  # diloco holds several models, context_autoregressive serves
        with pytest.raises(ValueError, match=rf"mesh: got axes .*'{axis}' has none"):
            ParallelMesh.from_rules(mesh, MAXTEXT)
        assert ParallelMesh.from_rules(mesh, MAXTEXT, replicated=axis).replicated == (axis,)
        return
    found = roles(ParallelMesh.from_rules(mesh, MAXTEXT))
    expected = {ROLE[axis]: (axis,)} | ({"fsdp": (axis,)} if axis in OF_KERNEL else {})
    assert found == dict.fromkeys(found, ()) | expected


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "expert": 2, "tensor": 2},
        {"tensor_sequence": 2, "context": 2, "fsdp_transpose": 2},
        {"context_usp_ulysses": 2, "context": 2, "autoregressive": 2},
    ],
    ids=lambda sizes: "-".join(sizes),
)
def test_specs_are_those_of_flax(sizes):
    """In the order of the axes, too, which decides what each device holds."""
    mesh = mesh_of(AXES, **sizes)
    parallel = ParallelMesh.from_rules(mesh, MAXTEXT)

    def expected(*names):
        spec = linen.logical_to_mesh_axes(
            names, rules=[(name, tuple(np.ravel(axes))) for name, axes in MAXTEXT]
        )
        kept = [tuple(a for a in entry or () if mesh.shape[a] > 1) for entry in spec]
        return jax.NamedSharding(mesh, jax.P(*[entry or None for entry in kept]))

    def same(spec, *names):
        return parallel.sharding(spec).is_equivalent_to(expected(*names), len(names))

    assert same(parallel.tokens_spec, "activation_embed_and_logits_batch", "activation_length")
    assert same(parallel.kernel_spec("hv"), "embed_vocab", "vocab")
    assert same(parallel.kernel_spec("vh"), "vocab", "embed_vocab")


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_meshes_of_maxtext(name):
    axes, rules, expected = CUSTOM[name]
    for i in range(0, len(axes), 3):  # as many as 8 devices make
        sizes = dict.fromkeys(axes[i : i + 3], 2)
        found = roles(ParallelMesh.from_rules(mesh_of(axes, **sizes), rules))
        assert found == {
            role: tuple(a for a in expected.get(role, ()) if a in sizes) for role in found
        }


def test_numbers_on_such_a_mesh_are_those_of_one_device():
    mesh = mesh_of(AXES, fsdp=2, context=2, tensor_sequence=2)
    parallel = ParallelMesh.from_rules(mesh, MAXTEXT)
    hidden = jax.random.normal(jax.random.key(0), (4, 8, 8))
    kernel = jax.random.normal(jax.random.key(1), (8, 24))
    targets = jnp.arange(32).reshape(4, 8) % 24

    def loss(hidden, kernel, targets, parallel=None):
        return log_probs_from_hidden(
            hidden, Head(kernel), targets, parallel=parallel
        ).log_probs.sum()

    expected = jax.value_and_grad(loss, 1)(hidden, kernel, targets)
    placed = jax.device_put(kernel, parallel.sharding(parallel.kernel_spec("hv")))
    got = jax.value_and_grad(loss, 1)(hidden, placed, targets, parallel)
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=2e-5, atol=2e-6)
    assert got[1].sharding.is_equivalent_to(placed.sharding, 2)


def test_rules_of_flax_and_names_of_ones_own():
    mesh = mesh_of(("data", "seq", "model"), data=2, seq=2, model=2)
    rules = [
        ("batch", "data"),
        ("length", "seq"),
        ("vocab", "model"),
        ("embed", None),
        ("mlp", "model"),
    ]
    expected = {"data": ("data",), "context": ("seq",), "tensor": ("model",), "fsdp": ()}
    assert roles(ParallelMesh.from_rules(mesh, rules)) == expected
    mine = [("rows", "data"), ("places", "seq"), ("words", "model"), ("width", ("data",))]
    named = ParallelMesh.from_rules(
        mesh, mine, batch="rows", length="places", vocab="words", embed="width"
    )
    assert roles(named) == expected | {"fsdp": ("data",)}
    assert named.kernel_spec("hv") == jax.P("data", "model")
    # a rule whose axis is taken by the other dimension gives way to a later one
    twice = [("batch", "data"), ("length", "data"), ("length", "seq"), ("vocab", "model")]
    assert roles(ParallelMesh.from_rules(mesh, twice)) == expected
    options = {"sequence_parallel": True, "context_layout": "zigzag"}
    made = ParallelMesh.from_rules(mesh, rules, **options)
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        (
            [("rows", "data")],
            {},
            r"rules: got names rows, expected one of activation_embed.*; pass batch=",
        ),
        (
            [("batch", "data")],
            {"vocab": "words"},
            r"vocab: got 'words', expected a name of the rules: batch",
        ),
        (["batch"], {}, r"rules: got 'batch', expected pairs"),
        ([("batch", 3.5)], {}, r"rules: got \('batch', 3.5\), expected names of mesh axes"),
        (
            [("batch", ["data", 1])],
            {},
            r"rules: got \('batch', \['data', 1\]\), expected names of mesh axes",
        ),
        (
            [("batch", "data"), ("vocab", "data")],
            {},
            r"rules: got mesh axes 'data' for 'vocab' and for tokens",
        ),
        (
            [("batch", "data"), ("vocab", "model")],
            {},
            r"mesh: got axes data=2, seq=2, model=2.*'seq' has none",
        ),
        (
            [("batch", "data"), ("embed", "seq")],
            {"replicated": ("seq", "model")},
            r"rules: got mesh axes 'seq' for 'embed' alone",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused_by_name(rules, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ParallelMesh.from_rules(
            mesh_of(("data", "seq", "model"), data=2, seq=2, model=2), rules, **options
        )

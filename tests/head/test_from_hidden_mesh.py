"""The mesh around the head: FSDP kernels, sequence-sharded hidden states, the user's own
shard_map, frozen heads.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import BF16, F32, H, R, T, call_head, check_head, head_arrays, truth, with_gradients
from jax.sharding import PartitionSpec as P
from programs import narrow_sums

from jaxppo import (
    Head,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from sharding import ParallelMesh, ShardAxes, make_parallel_mesh, vary
from sharding.testing import assert_trees_close


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("V", [97, 1026])
def test_fsdp_kernels_over_h(V, explicit):
    parallel = make_parallel_mesh("fsdp=4,tp=2", explicit=explicit)
    arrays = head_arrays(V, with_where=True)
    if explicit and V == 1026:  # the kernel arrives sharded as the optimiser holds it
        arrays["kernel"] = jax.device_put(
            arrays["kernel"], parallel.sharding(parallel.kernel_spec())
        )
    check_head([parallel], arrays, entropy="bonus")


SPECS = {  # of the kernel [H, V]
    "fsdp over V": P(None, "fsdp"),
    "fsdp over V, before tensor": P(None, ("fsdp", "tp")),
    "fsdp over V, after tensor": P(None, ("tp", "fsdp")),
    "fsdp over H and V": P("fsdp", ("data", "tp")),
    "whole": P(),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("name", SPECS)
def test_kernel_specs(name, layout):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 3)
    parallel = ParallelMesh(mesh, data="data", context=None, fsdp="fsdp")
    full = (*SPECS[name], None, None)[:2]
    spec = P(*full) if layout == "hv" else P(*reversed(full))
    # four shards' last block overlaps the one before
    arrays = head_arrays(1032, layout=layout, last=1030)
    check_head([parallel], arrays, entropy="bonus", layout=layout, spec=spec, vocab_size=1030)


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_tensor_axes_in_another_order_than_the_meshs(axes):
    """Shards of the vocabulary lie as the spec says: taken in the mesh's order, half of all ids
    would be others.
    """
    mesh = jax.make_mesh((2, 2, 2), ("dp", "a", "b"), (jax.sharding.AxisType.Auto,) * 3)
    parallel = ParallelMesh(mesh, data="dp", context=None, tensor=("a", "b"))
    check_head([parallel], head_arrays(1032), entropy="bonus", spec=P(None, axes))


@functools.cache
def gradients_in_one_pass(columns, mesh=None, spec=None):
    """The gradients of a loss with respect to kernel, bias and hidden states."""
    arrays = head_arrays(columns)
    ones = np.ones((R, T), np.float32)
    ids = np.ones((R, T), np.int32)
    places = np.broadcast_to(np.arange(T, dtype=np.int32), (R, T))
    rows = np.arange(R, dtype=np.int32)[:, None]
    targets = arrays["targets"]
    weights = {"advantages": arrays["g"], "old_log_probs": -7 * ones}
    batch = RolloutBatch(
        targets, targets, ids, places, ones, rows, real_last_targets=True, **weights
    )
    options = {"parallel": mesh and make_parallel_mesh(mesh), "memory": 2**30}

    def loss(kernel, bias, hidden):
        head = Head(kernel, bias=bias, spec=spec)
        return policy_loss_from_hidden(hidden, head, batch, PolicyLossConfig(), **options)[0]

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    return gradients(arrays["kernel"], arrays["bias"], arrays["hidden"])


@pytest.mark.every(4)
@pytest.mark.parametrize("columns", [1032, 1040])
@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2,tp=2", "fsdp=4,tp=2"])
@pytest.mark.parametrize("name", SPECS)
def test_kernel_specs_in_one_pass(name, mesh, columns):
    """As without a mesh, whose loss other tests compare with float64."""
    # an axis that the other mesh lacks is left out
    data = {"data": "dp" if mesh.startswith("dp=") else None}
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in SPECS[name])
    spec = P(*(tuple(filter(None, (data.get(n, n) for n in entry))) or None for entry in entries))
    expected = gradients_in_one_pass(columns)
    assert all(np.isfinite(x).all() for x in expected)
    assert_trees_close(gradients_in_one_pass(columns, mesh, spec), expected)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_kernel_spec_may_name_an_axis_of_size_1(explicit):
    """As the specs of a model do on a mesh without tensor parallelism: given, or the sharding of
    an Explicit array.
    """
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 1), ("fsdp", "tp"), (kind,) * 2, devices=jax.devices()[:4])
    arrays = head_arrays(104)
    spec = P("fsdp", "tp")
    if explicit:
        arrays["kernel"] = jax.device_put(arrays["kernel"], jax.NamedSharding(mesh, spec))
    check_head([ParallelMesh(mesh)], arrays, entropy="bonus", spec=None if explicit else spec)


def test_fsdp_gradients_of_bf16():
    parallel = make_parallel_mesh("fsdp=4,tp=2")
    check_head([parallel], head_arrays(1026, dtype="bfloat16"), entropy="bonus", **BF16)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("with_where", [False, True])
def test_sequence_parallel(with_where, explicit):
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", sequence_parallel=True, explicit=explicit)
    arrays = head_arrays(1026, with_where=with_where)
    check_head([parallel], arrays, entropy="bonus", device="five")


def test_hidden_spec():
    """The sequence-sharded hidden states of a mesh whose other hidden states are not."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    sharded = dataclasses.replace(parallel, sequence_parallel=True)
    check_head([parallel], head_arrays(97), entropy="bonus", hidden_spec=sharded.hidden_spec)


@pytest.mark.parametrize(
    ("axes", "roles"),
    [
        # MaxText
        (
            ("data", "fsdp", "context", "tensor"),
            {"data": "data", "fsdp": "fsdp", "context": "context"},
        ),
        (
            ("dcn", "fsdp", "unused", "tensor"),
            {"data": ("dcn", "fsdp"), "fsdp": "fsdp", "context": None},
        ),
    ],
)
def test_axis_names_of_others(axes, roles):
    mesh = jax.make_mesh((2, 2, 1, 2), axes, (jax.sharding.AxisType.Auto,) * 4)
    check_head([ParallelMesh(mesh, tensor="tensor", **roles)], head_arrays(104), entropy="bonus")


def test_tunix_axes():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    parallel = ParallelMesh(mesh, data="fsdp", fsdp="fsdp")
    check_head([parallel], head_arrays(104), entropy="bonus")


def test_a_replicated_axis():
    """Tokens are replicated over the axis, and count once."""
    mesh = jax.make_mesh((2, 2, 2), ("dp", "expert", "tp"), (jax.sharding.AxisType.Auto,) * 3)
    check_head(
        [ParallelMesh(mesh, replicated="expert")],
        head_arrays(1026, with_where=True),
        entropy="bonus",
    )


# Inside the user's own shard_map


def in_shard_map(parallel, axes, arrays, kernel_spec, *, grad_inside, varies=False, **options):
    """Gradients of a sum over all tokens with respect to hidden states and kernel, on arrays
    sharded by hand.
    """
    names = ("hidden", "kernel", "targets", "g", "e", "where")
    tokens = parallel.tokens_spec
    specs = (parallel.hidden_spec, kernel_spec, tokens, tokens, tokens, tokens)

    def total(hidden, kernel, targets, g, e, where):
        if varies:
            kernel = vary(kernel, axes.tokens)
        local = {"hidden": hidden, "kernel": kernel, "targets": targets, "where": where}
        stats = call_head(axes, local, entropy="bonus", **options)
        return jax.lax.psum((stats.log_probs * g + stats.entropy * e).sum(), axes.tokens)

    if grad_inside:
        run = jax.shard_map(
            jax.grad(total, (0, 1)), mesh=parallel.mesh, in_specs=specs, out_specs=specs[:2]
        )
    else:
        run = jax.grad(
            jax.shard_map(total, mesh=parallel.mesh, in_specs=specs, out_specs=P()), (0, 1)
        )
    return jax.jit(run)(*(arrays[name] for name in names))


@pytest.mark.parametrize("grad_inside", [False, True])
@pytest.mark.parametrize("kernel_spec", [P(None, "tp"), P()])
def test_inside_a_users_shard_map(kernel_spec, grad_inside):
    """A kernel that is sharded over the tensor axis, and one that is whole everywhere but stands
    for a shard of it.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    arrays = head_arrays(1026, with_where=True, bias=False)
    expected = truth(call_head, arrays, entropy="bonus")[1]
    got = in_shard_map(
        parallel, ShardAxes("dp", "cp", "tp"), arrays, kernel_spec, grad_inside=grad_inside
    )
    assert_trees_close(got, (expected["hidden"], expected["kernel"]), **F32)


def test_hidden_states_that_devices_share_while_their_targets_differ():
    """Each device has its own cotangents of them, which are summed in f32, and rounded once."""
    mesh = jax.make_mesh((8,), ("dp",), (jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, T, H)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(H, 97)), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, 97, (8, T)), jnp.int32)

    def total(hidden, targets):
        stats = log_probs_from_hidden(hidden, kernel, targets, parallel=ShardAxes("dp", None, ()))
        return jax.lax.psum(stats.log_probs.sum(), "dp")

    fn = jax.grad(jax.shard_map(total, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P()))
    assert narrow_sums(fn, hidden, targets) == []
    exact = jax.grad(
        lambda h: log_probs_from_hidden(
            jnp.repeat(h, 8, 0), kernel.astype(jnp.float32), targets
        ).log_probs.sum()
    )(hidden.astype(jnp.float32))
    assert_trees_close(jax.jit(fn)(hidden, targets).astype(jnp.float32), exact, **BF16)


@pytest.mark.parametrize("grad_inside", [False, True])
def test_a_kernel_that_varies_over_data(grad_inside):
    """The user's pcast makes it vary: each device has its own cotangent, and the pcast's
    transpose sums them.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    arrays = head_arrays(1026, with_where=True, bias=False)
    expected = truth(call_head, arrays, entropy="bonus")[1]
    axes = ShardAxes("dp", "cp", "tp")
    got = in_shard_map(parallel, axes, arrays, P(None, "tp"), grad_inside=grad_inside, varies=True)
    assert_trees_close(got, (expected["hidden"], expected["kernel"]), **F32)


def test_fsdp_and_sequence_parallel_inside_a_users_shard_map():
    parallel = make_parallel_mesh("fsdp=2,cp=2,tp=2", sequence_parallel=True)
    arrays = head_arrays(1026, with_where=True, bias=False)
    expected = truth(call_head, arrays, entropy="bonus")[1]
    got = in_shard_map(parallel, parallel.axes, arrays, parallel.kernel_spec(), grad_inside=False)
    assert_trees_close(got, (expected["hidden"], expected["kernel"]), **F32)


def test_vmap_inside_a_users_shard_map():
    """Row by row; each row's gradient of the kernel is summed over devices, then over rows."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    arrays = head_arrays(1026, with_where=True, bias=False)
    expected = truth(call_head, arrays, entropy="bonus")[1]
    names = ("hidden", "targets", "where", "g", "e")
    tokens = parallel.tokens_spec

    def inside(kernel, *per_token):
        def total(kernel, hidden):
            def row(*x):
                return call_head(
                    parallel.axes,
                    {"kernel": kernel, **dict(zip(names, x, strict=True))},
                    entropy="bonus",
                )

            stats = jax.vmap(row)(*(x[:, None] for x in (hidden, *per_token[1:])))
            g, e = per_token[3:]
            return jax.lax.psum(
                (stats.log_probs[:, 0] * g + stats.entropy[:, 0] * e).sum(), parallel.axes.tokens
            )

        return jax.grad(total, (0, 1))(kernel, per_token[0])

    of_both = parallel.kernel_spec(), parallel.hidden_spec
    run = jax.shard_map(
        inside, mesh=parallel.mesh, in_specs=(*of_both, *[tokens] * 4), out_specs=of_both
    )
    got = jax.jit(run)(arrays["kernel"], *(arrays[name] for name in names))
    assert_trees_close(got, (expected["kernel"], expected["hidden"]), **F32)


def test_check_vma_off_is_refused():
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    arrays = head_arrays(104)
    axes = ShardAxes("dp", "cp", "tp")
    specs = (parallel.hidden_spec, parallel.kernel_spec(), parallel.tokens_spec)

    def inside(hidden, kernel, targets):
        return call_head(axes, {"hidden": hidden, "kernel": kernel, "targets": targets}).log_probs

    run = jax.shard_map(
        inside, mesh=parallel.mesh, in_specs=specs, out_specs=parallel.tokens_spec, check_vma=False
    )
    with pytest.raises(
        ValueError, match="got check_vma=False over axis 'dp', expected check_vma=True"
    ):
        jax.jit(run)(arrays["hidden"], arrays["kernel"], arrays["targets"])


def test_a_frozen_head_in_a_model_that_learns():
    """LoRA: hidden states get a gradient through a matrix before the head; the kernel is a
    constant.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    arrays = head_arrays(1026, bias=False)
    lora = jnp.eye(H) + 0.1

    def loss(parallel, lora, frozen):
        kernel = jax.lax.stop_gradient(arrays["kernel"]) if frozen else arrays["kernel"]
        stats = call_head(
            parallel,
            {**arrays, "hidden": arrays["hidden"] @ lora, "kernel": kernel},
            entropy="bonus",
        )
        return (stats.log_probs * arrays["g"] + stats.entropy * arrays["e"]).sum()

    gradients = [
        jax.jit(jax.grad(lambda w, p=p, f=f: loss(p, w, f)))(lora)
        for p, f in [(None, False), (parallel, True)]
    ]
    assert_trees_close(gradients[1], gradients[0], rtol=5e-6, atol=5e-6)
    assert np.abs(gradients[0]).max() > 1


def test_the_gradient_keeps_the_sharding_of_the_kernel():
    for parallel in (
        make_parallel_mesh("fsdp=4,tp=2"),
        make_parallel_mesh("fsdp=4,tp=2", explicit=True),
    ):
        arrays = head_arrays(1024)
        arrays["kernel"] = jax.device_put(
            arrays["kernel"], parallel.sharding(parallel.kernel_spec())
        )
        _, gradients = jax.jit(
            lambda a, p=parallel: with_gradients(call_head, p, a, entropy="none")
        )(arrays)
        assert gradients["kernel"].sharding.is_equivalent_to(arrays["kernel"].sharding, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("tp", None), r"head.spec: got .* expected the tensor axes .* on the vocabulary only"),
        (
            P(None, "absent"),
            (
                r"kernel: got spec P\(None, 'absent'\) .* expected axes of the mesh, \('dp', 'cp',"
                r" 'tp'\)"
            ),
        ),
    ],
)
def test_kernel_specs_that_cannot_be(spec, message):
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    with pytest.raises(ValueError, match=message):
        call_head(parallel, head_arrays(104), spec=spec)


def test_a_kernel_whose_rows_lie_along_an_axis_where_tokens_are_equal():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "expert", "tp"), (jax.sharding.AxisType.Auto,) * 3)
    parallel = ParallelMesh(mesh, replicated="expert")
    with pytest.raises(
        ValueError,
        match=r"head.spec: got .* expected H over axes that tokens are spread over, \('dp',\)",
    ):
        call_head(parallel, head_arrays(104), spec=P("expert", "tp"))


@pytest.mark.parametrize("name", ["head.spec", "hidden_spec"])
def test_specs_without_a_mesh(name):
    arrays = head_arrays(104)
    of_head = {"spec": P("fsdp", None)} if name == "head.spec" else {}
    options = {} if of_head else {"hidden_spec": P("dp", None, None)}
    with pytest.raises(
        ValueError,
        match=rf"{name}: got .* without parallel=, expected the mesh that has these axes",
    ):
        log_probs_from_hidden(
            arrays["hidden"], Head(arrays["kernel"], **of_head), arrays["targets"], **options
        )


def test_rows_and_positions_that_the_mesh_does_not_divide():
    arrays = {k: x[:, :7] if x.shape[:2] == (R, T) else x for k, x in head_arrays(104).items()}
    with pytest.raises(
        ValueError, match=r"hidden: got shape \(8, 7, 12\).*dimension 1 .* multiple of 2, .*'cp'"
    ):
        call_head(make_parallel_mesh("dp=2,cp=2,tp=2"), arrays)
    arrays = {k: x[:6] if x.shape[:2] == (R, T) else x for k, x in head_arrays(104).items()}
    with pytest.raises(
        ValueError, match=r"hidden: got shape \(6, 8, 12\).*dimension 0 .* multiple of 4, .*'dp'"
    ):
        call_head(make_parallel_mesh("dp=4,tp=2"), arrays)

"""The statistics of a token's distribution on request, against float64 numpy, in all ways, on
any mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import F32, R, T, call_head, head_arrays, with_gradients
from jax.sharding import PartitionSpec as P
from oracle import OracleHead
from oracle.head import (
    head_gradient,
    id_log_probs,
    likeliest_ids,
    log_softmax,
    logits,
    set_entropy,
    token_stats,
)

from jaxppo import log_probs_from_hidden, log_probs_from_logits
from jaxppo.step.entropy import renormalised_entropy
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.testing import assert_trees_close

# several blocks of columns, which the tensor axis does not divide
MIXED, V, MASKED = "dp=2,cp=2,tp=2", 1030, 700
NIGHTLY = pytest.mark.nightly
NAMES = ("log_z", "mean_logit", "accuracy", "sum_p2")


def arrays_with_ties(seed=0, columns=V, masked=MASKED):
    """Logits are small integers, so that ties cross blocks and devices; the first `masked` columns
    have a bias of -inf.

    Rows that do not count hold NaN. Some targets are the last of the likeliest.
    """
    rng = np.random.default_rng(seed)
    arrays = head_arrays(columns, with_where=True)
    here = np.asarray(arrays["where"])
    hidden = rng.integers(-2, 3, arrays["hidden"].shape)
    kernel = rng.integers(-1, 2, arrays["kernel"].shape)
    bias = np.where(np.arange(columns) < masked, -np.inf, 0)
    last_likeliest = columns - 1 - np.argmax((hidden @ kernel + bias)[..., ::-1], axis=-1)
    targets = np.where(
        rng.random(here.shape) < 0.5, last_likeliest, rng.integers(masked, columns, here.shape)
    )
    assert 0 < (targets == last_likeliest)[here].mean() < 1
    rest = {
        "hidden": jnp.asarray(np.where(here[..., None], hidden, np.nan), jnp.float32),
        "kernel": jnp.asarray(kernel, jnp.float32),
        "bias": jnp.asarray(bias, jnp.float32),
        "targets": jnp.asarray(np.where(here, targets, -100), jnp.int32),
    }
    return arrays | rest


def from_logits(parallel, arrays, device=None, **options):
    hidden = jnp.where(arrays["where"][..., None], arrays["hidden"], 0)
    z = jnp.matmul(hidden, arrays["kernel"], precision="highest") + arrays["bias"][None, None]
    return log_probs_from_logits(
        z, arrays["targets"], parallel=parallel, where=arrays["where"], **options
    )


def expected(arrays, k, temperature):
    """By name; 0 for tokens that do not count."""
    here = np.asarray(arrays["where"])
    head = OracleHead(
        np.asarray(arrays["kernel"], np.float64), np.asarray(arrays["bias"], np.float64)
    )
    z = logits(np.asarray(arrays["hidden"], np.float64)[here], head, temperature)
    stats = token_stats(z, np.asarray(arrays["targets"])[here])
    ids = likeliest_ids(z, k)
    found = {
        "log_z": stats.log_z,
        "mean_logit": stats.mean_logit,
        "accuracy": stats.likeliest,
        "sum_p2": (np.exp(log_softmax(z)) ** 2).sum(-1),
        "top_ids": ids,
        "top_log_probs": id_log_probs(z, ids),
    }
    every = {name: np.zeros((R, T, *x.shape[1:])) for name, x in found.items()}
    for name, x in found.items():
        every[name][here] = x
    return every


def check(found, arrays, k, temperature=0.75):
    for name, x in expected(arrays, k, temperature).items():
        np.testing.assert_allclose(getattr(found, name), x, rtol=5e-6, atol=1e-6, err_msg=name)


BY_DAY = [("xla", MIXED), ("wide", MIXED), ("logits", "tp=8")]
WAYS = [(way, mesh) for way in ("xla", "wide", "logits") for mesh in (None, MIXED, "tp=8")]


@pytest.mark.parametrize(
    ("way", "mesh"), [pytest.param(*x, marks=[] if x in BY_DAY else NIGHTLY) for x in WAYS]
)
def test_all_of_them(way, mesh):
    """In columns that tp does not divide; with -inf columns; 0 where nothing counts; of equals
    the lowest id first.
    """
    arrays = arrays_with_ties()
    parallel = mesh and make_parallel_mesh(mesh)
    call = from_logits if way == "logits" else call_head
    options = {"device": "wide" if way == "wide" else "five", "temperature": 0.75}
    found = jax.jit(lambda a: call(parallel, a, logit_stats=NAMES, top_k=7, **options))(arrays)
    check(found, arrays, 7)


@pytest.mark.parametrize("k", [1, pytest.param(256, marks=NIGHTLY), 400])
@pytest.mark.parametrize("call", [call_head, from_logits])
def test_the_likeliest(call, k):
    """One alone is found in another way; of 400 there are only 330, the others are empty slots;
    more than a block.
    """
    arrays = arrays_with_ties(k)
    parallel = make_parallel_mesh(MIXED)
    found = jax.jit(lambda a: call(parallel, a, logit_stats=NAMES, top_k=k, temperature=0.75))(
        arrays
    )
    check(found, arrays, k)
    assert (found.top_ids == -1).any() == (k == 400)


@pytest.mark.parametrize("explicit", [pytest.param(False, marks=NIGHTLY), True])
def test_the_likeliest_of_a_vocabulary_in_pieces(explicit):
    """FSDP shards it too; pieces of one block lie far apart."""
    arrays = arrays_with_ties(columns=1024)
    parallel = make_parallel_mesh("fsdp=4,tp=2", explicit=explicit)
    spec = P(None, ("fsdp", "tp"))
    on = {"kernel": spec, "bias": P(("fsdp", "tp")), "hidden": parallel.hidden_spec}
    given = {
        name: jax.device_put(
            x, jax.NamedSharding(parallel.mesh, on.get(name, parallel.tokens_spec))
        )
        for name, x in arrays.items()
    }
    options = {"logit_stats": NAMES, "top_k": 7, "temperature": 0.75, "spec": spec, "memory": 2**19}
    check(jax.jit(lambda a: call_head(parallel, a, **options))(given), arrays, 7)


def test_a_negative_zero_is_a_zero():
    z = jnp.array([[[-0.0, 0.0, -1.0, 0.0]]])
    for k in (1, 3):
        found = log_probs_from_logits(z, jnp.zeros((1, 1), jnp.int32), top_k=k).top_ids
        assert found.tolist() == [[[0, 1, 3][:k]]]


def test_the_likeliest_have_the_same_bits_in_any_batch():
    arrays = arrays_with_ties(3)
    options = {"top_k": 5, "deterministic": True}
    whole = jax.jit(lambda a: call_head(None, a, **options))(arrays)
    alone = {
        name: x[4:6, 1:7] if name not in ("kernel", "bias") else x for name, x in arrays.items()
    }
    assert alone["where"].sum() == 5
    part = jax.jit(lambda a: call_head(None, a, **options))(alone)
    assert_trees_close(part, jax.tree.map(lambda x: x[4:6, 1:7], whole), 0, 0)


def primitives(call, **options):
    """The number of reductions in the program of a call."""
    hidden = jnp.ones((1, 4, 3))
    kernel = jnp.ones((3, 64))
    program = str(
        jax.make_jaxpr(lambda *a: call(*a, jnp.zeros((1, 4), jnp.int32), **options))(hidden, kernel)
    )
    return {
        name: program.count(f" {name}[")
        for name in ("reduce_sum", "reduce_max", "top_k", "reduce", "sort")
    }


def by_logits(hidden, kernel, targets, **options):
    return log_probs_from_logits(hidden @ kernel, targets, **options)


@pytest.mark.parametrize("call", [log_probs_from_hidden, by_logits])
def test_what_is_not_asked_for_is_not_in_the_program(call):
    """Each has a reduction of its own, but for log z, which every log-prob needs."""
    plain = primitives(call)
    assert plain["top_k"] == plain["reduce"] == plain["sort"] == 0
    more = {
        "log_z": {},
        "mean_logit": {"reduce_sum": 2},
        "accuracy": {"reduce_max": 1},
        "sum_p2": {"reduce_sum": 1},
    }
    for name, extra in more.items():
        assert primitives(call, logit_stats=(name,)) == {
            k: n + extra.get(k, 0) for k, n in plain.items()
        }, name
    assert primitives(call, top_k=2) == plain | {"top_k": 1}
    assert primitives(call, top_k=1) == plain | {"reduce": 1}
    args = jnp.ones((1, 4, 3)), jnp.ones((3, 64)), jnp.zeros((1, 4), jnp.int32)
    found = call(*args, logit_stats=["sum_p2"])
    assert [name for name in NAMES if getattr(found, name) is not None] == ["sum_p2"]


def test_the_audit_tells_of_what_the_likeliest_send():
    parallel = make_parallel_mesh("dp=4,tp=2")
    arrays = head_arrays(96)
    notes = audit(lambda a: call_head(parallel, a, top_k=5), arrays).notes
    assert "5 likeliest ids per token, gathered over the tensor axis" in notes


@pytest.mark.parametrize("mesh", [pytest.param(None, marks=NIGHTLY), MIXED])
def test_the_entropy_of_a_nucleus(mesh):
    """By its ids.

    With `nucleus_ids` log-probs are renormalised, the entropy stays that of the full distribution.
    """
    arrays = head_arrays(97, nucleus=4, ids=4, with_where=True) | {"g": jnp.zeros((R, T))}
    rng = np.random.default_rng(1)
    here = np.asarray(arrays["where"])
    nucleus = np.argsort(rng.random((R, T, 97)), axis=-1)[..., :5].astype(np.int32)
    nucleus[:, 2:, 3:] = -1
    nucleus[:, 4] = -1
    arrays |= {"nucleus_ids": jnp.asarray(nucleus), "ids": jnp.asarray(nucleus)}
    parallel = mesh and make_parallel_mesh(mesh)

    def call(parallel, given, **options):
        stats = call_head(parallel, given, **options)
        inside = renormalised_entropy(stats.id_log_probs)
        return type(stats)(
            stats.log_probs, inside, sum_p2=stats.entropy, id_log_probs=jnp.zeros_like(given["i"])
        )

    given = arrays | {"i": jnp.zeros(nucleus.shape)}
    run = jax.jit(
        lambda a: with_gradients(call, parallel, a, ("hidden", "kernel"), entropy="bonus")
    )
    found, gradients = run(given)
    head = OracleHead(
        np.asarray(arrays["kernel"], np.float64), np.asarray(arrays["bias"], np.float64)
    )
    hidden = np.asarray(arrays["hidden"], np.float64)[here]
    z = logits(hidden, head)
    e = np.asarray(arrays["e"], np.float64)[here]
    entropy, dz = set_entropy(z, nucleus[here])
    of_hidden, of_head = head_gradient(hidden, head, e[:, None] * dz)
    np.testing.assert_allclose(np.asarray(found.entropy)[here], entropy, **F32)
    np.testing.assert_allclose(
        np.asarray(found.sum_p2)[here], token_stats(z, np.zeros(len(z), int)).entropy, **F32
    )
    np.testing.assert_allclose(
        np.asarray(gradients["hidden"])[here], of_hidden, rtol=5e-6, atol=5e-6
    )
    np.testing.assert_allclose(gradients["kernel"], of_head.kernel, rtol=5e-6, atol=5e-6)


def test_the_entropy_of_the_likeliest():
    arrays = head_arrays(97)
    found = call_head(None, arrays, top_k=6)
    head = OracleHead(
        np.asarray(arrays["kernel"], np.float64), np.asarray(arrays["bias"], np.float64)
    )
    z = logits(np.asarray(arrays["hidden"], np.float64).reshape(R * T, -1), head)
    entropy, _ = set_entropy(z, likeliest_ids(z, 6))
    np.testing.assert_allclose(
        renormalised_entropy(found.top_log_probs).reshape(-1), entropy, **F32
    )


def test_bad_input():
    z = jnp.zeros((1, 2, 4))
    targets = jnp.zeros((1, 2), jnp.int32)
    for bad in (True, "log_z", ("log_y",), None):
        with pytest.raises(
            ValueError, match=r"logit_stats: got .*, expected some of \('log_z', 'mean_logit'"
        ):
            log_probs_from_logits(z, targets, logit_stats=bad)
        with pytest.raises(ValueError, match=r"logit_stats: got .*, expected some of"):
            log_probs_from_hidden(z, jnp.zeros((4, 8)), targets, logit_stats=bad)
    for bad in (-1, 1.0, True, None):
        with pytest.raises(
            ValueError, match=r"top_k: got .*, expected a whole number of at least 0"
        ):
            log_probs_from_logits(z, targets, top_k=bad)
    with pytest.raises(TypeError, match="log_probs: got dtype int32, expected float"):
        renormalised_entropy(targets)
    with pytest.raises(ValueError, match=r"log_probs: got shape \(\), expected \[..., K\]"):
        renormalised_entropy(jnp.float32(0))

"""Real heads compiled for TPU topologies with no TPU present: memory and collectives of each
device.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from examples.planner.pod_head import plain_stats
from jaxppo import (
    Head,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from sharding import ParallelMesh
from sharding.audit import audit

GIB = 2**30
H, V = 4096, 151936  # Qwen3-8B


@functools.cache
def sixteen(sizes, names, chips="v5p:2x2x4", **roles):
    """16 described chips."""
    topology = topologies.get_topology_desc(chips, platform="tpu")
    return ParallelMesh(Mesh(np.array(topology.devices).reshape(sizes), names), **roles)


def arguments(parallel, tokens, *, with_where=False, hidden_size=H, columns=V, dtype=jnp.bfloat16):
    """The arguments of a loss, `tokens` a device: hidden states, kernel, targets, weights, on
    request a mask.
    """
    R = parallel.data_size
    T = tokens * parallel.context_size

    def described(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(spec))

    per_token = [jnp.int32, jnp.float32] + [bool] * with_where
    return (
        described((R, T, hidden_size), dtype, parallel.hidden_spec),
        described((hidden_size, columns), dtype, parallel.kernel_spec()),
        *(described((R, T), dtype, parallel.tokens_spec) for dtype in per_token),
    )


def head(parallel, **options):
    def loss(hidden, kernel, targets, weights, where=None):
        options.setdefault("entropy", "bonus")
        stats = log_probs_from_hidden(
            hidden, kernel, targets, parallel=parallel, where=where, **options
        )
        return (stats.log_probs * weights).sum() + (stats.entropy * weights).sum()

    return loss


def plain(parallel):
    def loss(hidden, kernel, targets, weights):
        logits = jax.lax.with_sharding_constraint(
            hidden @ kernel, parallel.sharding(parallel.logits_spec)
        )
        log_probs, entropy = plain_stats(logits.astype(jnp.float32), targets)
        return ((log_probs + entropy) * weights).sum()

    return loss


def sums(found):
    """(op, axes, in a loop) and bytes of each collective, without those of the scalar loss."""
    return sorted((c.op, c.axes, c.in_loop, c.bytes) for c in found.collectives if c.bytes > 8)


def large(found, op, axis):
    return [
        (c.bytes, c.in_loop)
        for c in found.collectives
        if (c.op, c.axes) == (op, (axis,)) and c.bytes >= 2**20
    ]


def assert_goes_around(found, axis, numbers, gathered=True, in_loop=True):
    """A sum over four devices goes around a ring in f32, a fourth of `numbers` at a time, half of
    that each way.

    Shares are rounded to bf16 and gathered. No other collective over the axis is as large.
    """
    half = numbers // 4 // 2
    assert Counter(large(found, "collective-permute", axis)) == {(4 * half, in_loop): 6}
    assert large(found, "all-gather", axis) == ([(2 * numbers, in_loop)] if gathered else [])
    assert not large(found, "reduce-scatter", axis)
    assert not large(found, "all-reduce", axis)


IN_BF16 = re.compile(r"= bf16\[\S+ (all-reduce|reduce-scatter)\(")  # a sum over devices
CP4_TP4 = ((4, 4), ("cp", "tp"))


def test_qwen3_8b_on_16_chips():
    parallel = sixteen(*CP4_TP4)
    found = audit(jax.value_and_grad(head(parallel), (0, 1)), *arguments(parallel, 8192))
    assert found.temp_bytes <= 0.25 * GIB
    assert found.output_bytes <= 1.01 * (8192 * H + H * V // 4) * 2
    assert_goes_around(found, "cp", H * 2048)  # dkernel, in the loop that makes a block of it
    assert_goes_around(found, "tp", H * 8192, in_loop=False)  # dhidden
    assert [x for x in sums(found) if x[0] == "all-reduce"] == [
        ("all-reduce", ("tp",), False, 4 * 8192),
        ("all-reduce", ("tp",), False, 3 * 4 * 8192),
    ]
    assert not IN_BF16.search(found.text)
    assert [c.axes for c in found.collectives if c.bytes <= 8] == [("cp",)]
    # four products of 2 H V / 4 flops a token, and the overlap of the last block
    exact = 4 * 2 * 8192 * H * V // 4
    assert exact <= found.flops.low == found.flops.high <= 1.11 * exact


def test_a_sum_that_devices_do_not_share_is_in_f32_too():
    """40 rows of 100 features cannot be cut into shares, so there is one sum, which is rounded
    afterwards.
    """
    parallel = sixteen(*CP4_TP4)
    args = arguments(parallel, 40, hidden_size=100, columns=160)
    found = audit(jax.value_and_grad(head(parallel), (0, 1)), *args)
    assert {c.op for c in found.collectives} == {"all-reduce"}
    assert not IN_BF16.search(found.text)


def test_the_forward_is_one_maximum_and_one_sum():
    parallel = sixteen(*CP4_TP4)
    found = audit(
        lambda *a: log_probs_from_hidden(*a, parallel=parallel, entropy="metric"),
        *arguments(parallel, 8192)[:3],
    )
    assert sums(found) == [
        ("all-reduce", ("tp",), False, 4 * 8192),
        ("all-reduce", ("tp",), False, 3 * 4 * 8192),
    ]
    assert found.temp_bytes <= 0.15 * GIB


@pytest.mark.nightly
@pytest.mark.parametrize(("chips", "gib"), [("v6e:4x4", 0.15), ("v5p:2x2x4", 0.3)])
def test_a_forward_copies_no_kernel(chips, gib):
    """A kernel [H, V] whose V 128 divides is not turned: that would be a copy of 1.16 GiB."""
    parallel = sixteen((16, 1), ("cp", "tp"), chips=chips)
    found = audit(
        lambda *a: log_probs_from_hidden(*a, parallel=parallel, entropy="metric"),
        *arguments(parallel, 8192)[:3],
    )
    assert found.temp_bytes <= gib * GIB


@pytest.mark.nightly
def test_a_mask_costs_little_memory():
    parallel = sixteen(*CP4_TP4)
    found = audit(
        jax.value_and_grad(head(parallel), (0, 1)), *arguments(parallel, 8192, with_where=True)
    )
    assert found.temp_bytes <= 0.4 * GIB
    assert found.flops.low == 0
    assert np.isfinite(found.flops.high)


@pytest.mark.nightly
def test_the_plain_version_of_a_small_head_gathers_no_logits_either():
    """The plain version is partitioned well, so the comparison is fair: it only needs more
    memory.
    """
    parallel = sixteen(*CP4_TP4)
    args = arguments(parallel, 4096, hidden_size=256, columns=131072)
    plainly = audit(jax.value_and_grad(plain(parallel), (0, 1)), *args)
    blocked = audit(jax.value_and_grad(head(parallel), (0, 1)), *args)
    assert plainly.temp_bytes >= 4 * 4096 * 32768 >= 2 * blocked.temp_bytes
    assert "all-gather" not in {c.op for c in plainly.collectives}


@pytest.mark.nightly
def test_the_plain_version():
    parallel = sixteen(*CP4_TP4)
    assert (
        audit(jax.value_and_grad(plain(parallel), (0, 1)), *arguments(parallel, 8192)).temp_bytes
        >= 2 * GIB
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("with_where", "gib"), [(False, 1.0), (True, 1.3)])
def test_32768_tokens_a_device(with_where, gib):
    """In GiB, dhidden in f32 takes 0.5, and the hidden states that a mask brings to the front
    take 0.25.
    """
    parallel = sixteen(*CP4_TP4)
    args = arguments(parallel, 32768, with_where=with_where)
    found = audit(jax.value_and_grad(head(parallel), (0, 1)), *args)
    assert found.temp_bytes <= gib * GIB


@pytest.mark.nightly
def test_a_frozen_head():
    parallel = sixteen(*CP4_TP4)
    found = audit(jax.value_and_grad(head(parallel)), *arguments(parallel, 8192))
    assert {c.axes for c in found.collectives if c.bytes > 8} == {("tp",)}
    assert found.temp_bytes <= 0.25 * GIB
    assert found.flops.high <= 1.11 * 3 * 2 * 8192 * H * V // 4


@pytest.mark.nightly
def test_two_passes_gather_an_fsdp_kernel_once():
    parallel = sixteen((4, 4), ("fsdp", "tp"), data="fsdp", fsdp="fsdp")
    found = audit(jax.value_and_grad(head(parallel), (0, 1)), *arguments(parallel, 8192))
    shard = H * V // 4
    assert large(found, "all-gather", "fsdp") == [(2 * shard, False)]  # XLA makes one of both
    half = H * 2048 // 4 // 2
    assert Counter(large(found, "collective-permute", "fsdp")) == {(4 * half, True): 6}
    assert found.temp_bytes <= 0.6 * GIB


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [None, P(None, "fsdp")], ids=["H", "V"])
def test_a_sum_scattered_over_all_devices_is_in_f32(spec):
    """XLA makes one sum of such a scatter, in bf16 where all that it sees of the result is a
    conversion.
    """
    parallel = sixteen((16,), ("fsdp",), data="fsdp", fsdp="fsdp")
    hidden, kernel, *per_token = arguments(parallel, 2048, columns=131072)
    if spec is not None:
        kernel = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=parallel.sharding(spec))

    def loss(hidden, kernel, *per_token):
        return head(parallel)(hidden, Head(kernel, spec=spec), *per_token)

    found = audit(jax.value_and_grad(loss, (0, 1)), hidden, kernel, *per_token)
    assert not IN_BF16.search(found.text)


@pytest.mark.nightly
def test_sequence_sharded_hidden_states_are_gathered_once_and_scattered_back():
    parallel = sixteen(*CP4_TP4, sequence_parallel=True)
    found = audit(jax.value_and_grad(head(parallel), (0, 1)), *arguments(parallel, 8192))
    moved = {
        (c.op, c.in_loop) for c in found.collectives if c.axes == ("tp",) and c.bytes >= 8192 * H
    }
    assert moved == {("all-gather", False), ("reduce-scatter", False)}
    assert found.temp_bytes <= 0.5 * GIB


@pytest.mark.nightly
@pytest.mark.parametrize("columns", [128256, 50257 - 1, 262144])
def test_other_vocabularies(columns):
    parallel = sixteen(*CP4_TP4)
    found = audit(
        jax.value_and_grad(head(parallel), (0, 1)), *arguments(parallel, 8192, columns=columns)
    )
    assert found.temp_bytes <= 0.25 * GIB


@pytest.mark.parametrize(
    "tokens",
    [
        2000,
        pytest.param(1990, marks=pytest.mark.nightly),
        pytest.param(1000, marks=pytest.mark.nightly),
    ],
)
def test_any_number_of_tokens_compiles_for_a_v6e(tokens):
    """XLA for a v6e could not compile `rows[places] @ kernel` with 15 to 16 MiB of rows."""
    parallel = sixteen(*CP4_TP4, chips="v6e:4x4")
    hidden, kernel, targets, _ = arguments(parallel, tokens)
    run = functools.partial(log_probs_from_hidden, parallel=parallel, entropy="metric")
    assert audit(run, hidden, kernel, targets).temp_bytes < 0.15 * GIB


@pytest.mark.nightly
def test_dkernel_is_laid_out_as_the_kernel():
    """If V is a multiple of 128, a kernel stays `[H, V]`.

    A copy of its gradient in that layout would be 0.25 GiB.
    """
    parallel = sixteen(*CP4_TP4, chips="v6e:4x4")
    found = audit(
        jax.value_and_grad(head(parallel), (0, 1)), *arguments(parallel, 8192, columns=131072)
    )
    assert found.temp_bytes <= 0.3 * GIB


def policy_arguments(parallel, tokens, **sizes):
    """Hidden states, kernel and a batch, with a loss mask."""
    hidden, kernel, targets, weights = arguments(parallel, tokens, **sizes)
    one = jax.ShapeDtypeStruct(
        (parallel.data_size, 1), jnp.int32, sharding=parallel.sharding(parallel.rows_spec)
    )
    return (
        hidden,
        kernel,
        RolloutBatch(*[targets] * 4, weights, one, advantages=weights, old_log_probs=weights),
    )


def policy(parallel, **options):
    config = PolicyLossConfig(entropy_coef=0.01)

    def loss(hidden, kernel, batch):
        return policy_loss_from_hidden(hidden, kernel, batch, config, parallel=parallel, **options)[
            0
        ]

    return jax.value_and_grad(loss, (0, 1))


@pytest.mark.nightly
@pytest.mark.parametrize(("memory", "chunk"), [(None, 2048), (int(1.3 * GIB), 2048)])
def test_one_pass_in_its_bytes(memory, chunk):
    """By default one pass takes an eighth of the chip's memory.

    Chunks of at most 2048 tokens follow a mask.

    In GiB, the gradients of logits take 0.58, the logits of a chunk 0.29, hidden states and their
    gradient 0.12.
    """
    parallel = sixteen(*CP4_TP4)
    found = audit(policy(parallel, memory=memory), *policy_arguments(parallel, 8192))
    assert found.notes == (f"one pass, {chunk} tokens x {V // 4} columns",)
    assert found.temp_bytes <= (memory or 1.25 * GIB)
    assert large(found, "collective-permute", "cp")
    assert not IN_BF16.search(found.text)


@pytest.mark.nightly
def test_a_memory_that_the_messages_of_a_ring_do_not_fit():
    """One pass would take 1.2 GiB, and its chunks alone would fit."""
    parallel = sixteen(*CP4_TP4)
    found = audit(policy(parallel, memory=GIB), *policy_arguments(parallel, 8192))
    assert "two passes: one pass does not fit the memory" in found.notes
    assert found.temp_bytes <= GIB


@pytest.mark.nightly
@pytest.mark.parametrize(("with_where", "tokens"), [(False, 8192), (True, 2048)])
def test_kept_logits_in_their_bytes(with_where, tokens):
    """In GiB, f32 logits take 1.16, their gradients 0.58, and rows in order 0.12.

    Three products, no sum in a loop.
    """
    parallel = sixteen(*CP4_TP4)
    args = arguments(parallel, 8192, with_where=with_where)
    found = audit(jax.value_and_grad(head(parallel, memory=4 * GIB), (0, 1)), *args)
    assert found.notes == (f"kept logits, {tokens} tokens x {V // 4} columns",)
    assert found.temp_bytes <= 1.95 * GIB
    exact = 3 * 2 * 8192 * H * V // 4
    assert exact <= found.flops.high <= 1.01 * exact
    assert found.flops.low == (0 if with_where else found.flops.high)
    assert large(found, "collective-permute", "cp")
    assert not any(c.in_loop for c in found.collectives)
    assert not IN_BF16.search(found.text)


@pytest.mark.nightly
def test_kept_logits_that_do_not_fit_are_computed_again():
    parallel = sixteen(*CP4_TP4)
    found = audit(
        jax.value_and_grad(head(parallel, memory=GIB), (0, 1)), *arguments(parallel, 8192)
    )
    assert [note.split(",")[0] for note in found.notes] == ["forward", "gradients"]
    assert found.temp_bytes <= GIB


@pytest.mark.nightly
def test_a_sum_over_sixteen_devices_is_a_collective():
    parallel = sixteen((1, 16), ("cp", "tp"))
    found = audit(policy(parallel), *policy_arguments(parallel, 8192))
    assert {c.op for c in found.collectives if c.bytes >= 2**20} == {"all-reduce"}


@pytest.mark.nightly
def test_several_groups_add_to_one_gradient():
    """A product adds to the gradient of the kernel, 0.58 GiB in f32.

    A sum of its own would be as large once more.
    """
    parallel = sixteen(*CP4_TP4)
    found = audit(policy(parallel, follow_mask=False), *policy_arguments(parallel, 32768))
    assert found.notes == (f"one pass, 1024 tokens x {V // 4} columns, groups of 4096 tokens",)
    assert found.temp_bytes <= 1.3 * GIB


@pytest.mark.nightly
def test_one_pass_gathers_an_fsdp_kernel_once_and_scatters_its_gradient_once():
    parallel = sixteen((4, 4), ("fsdp", "tp"), data="fsdp", fsdp="fsdp")
    args = policy_arguments(parallel, 8192)
    found = audit(policy(parallel), *args)
    assert found.notes == (f"one pass, 2048 tokens x {V // 4} columns",)
    shard = H * V // 4
    assert large(found, "all-gather", "fsdp") == [(2 * shard, False)]
    assert Counter(large(found, "collective-permute", "fsdp")) == {(4 * shard // 8, False): 6}
    assert not IN_BF16.search(found.text)
    assert found.temp_bytes <= 1.4 * GIB
    # the gathered kernel and its f32 gradient count
    less = audit(policy(parallel, memory=int(0.9 * GIB)), *args)
    assert less.temp_bytes <= 1.1 * 0.9 * GIB


@pytest.mark.nightly
def test_one_pass_gathers_sequence_sharded_hidden_states_once():
    """They are gathered before the loop over chunks, and their gradient is scattered once after
    it.
    """
    parallel = sixteen(*CP4_TP4, sequence_parallel=True)
    found = audit(policy(parallel), *policy_arguments(parallel, 8192))
    assert large(found, "all-gather", "tp") == [(2 * 8192 * H, False)]
    [(size, in_loop)] = large(found, "reduce-scatter", "tp")
    assert not in_loop
    assert 4 * 8192 * H <= size < 1.1 * 4 * 8192 * H  # with rows that align it


@pytest.mark.nightly
def test_a_tpu7x_does_not_copy_gradients_of_logits():
    parallel = sixteen(*CP4_TP4, chips="tpu7x:2x2x2")
    found = audit(policy(parallel, follow_mask=False), *policy_arguments(parallel, 8192))
    assert found.time.copies < 0.1 * found.time.compute
    assert found.temp_bytes <= 1.5 * GIB


def test_too_little_memory_says_the_least_that_works():
    parallel = sixteen(*CP4_TP4)
    with pytest.raises(ValueError, match=r"memory: got 1024 bytes, expected at least \d+"):
        audit(policy(parallel, memory=1024), *policy_arguments(parallel, 8192))

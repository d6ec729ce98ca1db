"""Common mistakes of users: each case gives the right number, or an error that tells what to do.

One table by what the user does. "Without the check" names the number that a version without the
check gave.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from misuse_steps import (
    BATCH,
    CONFIG,
    HIDDEN,
    KERNEL,
    LOG_PROBS,
    RNG,
    H,
    R,
    T,
    V,
    loss_at,
    packed,
    samples,
)

from jaxppo import (
    GSPO,
    SFT,
    Head,
    LoRA,
    Normalizer,
    OffPolicyConfig,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    accumulate_gradients,
    advantages,
    explain_broken_rules,
    log_probs_from_hidden,
    loss_from_stats,
    make_parallel_mesh,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.mismatch import mismatch_metrics
from jaxppo.policy_losses import GMPO
from jaxppo.step.staleness import proximal_log_probs

# A head's adapters


def test_a_lora_is_honoured_and_modules_are_refused():
    """Without the check: the kernel of a module with adapters was taken alone, 1.15 nats off."""
    a, b = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((H, 2), (2, V)))
    targets = jnp.zeros((R, T), jnp.int32)
    got = log_probs_from_hidden(HIDDEN, Head(KERNEL, lora=LoRA(a, b, 0.5)), targets).log_probs
    merged = log_probs_from_hidden(HIDDEN, KERNEL + 0.5 * a @ b, targets).log_probs
    np.testing.assert_allclose(got, merged, rtol=1e-5, atol=1e-5)
    assert np.abs(got - log_probs_from_hidden(HIDDEN, KERNEL, targets).log_probs).max() > 0.5
    base = nnx.Linear(H, V, rngs=nnx.Rngs(0))
    for module in (
        base,
        nnx.LoRA(H, 2, V, base_module=base, rngs=nnx.Rngs(0)),
        {"kernel": KERNEL},
        base.kernel,
    ):
        with pytest.raises(
            TypeError, match=r"head: got \w+, expected a jaxppo.Head .* lora=LoRA\(a, b, scale\)"
        ):
            log_probs_from_hidden(HIDDEN, module, targets)


# Arrays that speak of another token


def unshifted(batch):
    """A batch whose mask stands at the tokens themselves, as token-aligned arrays do."""
    mask = np.zeros_like(batch.loss_mask)
    mask[:, 1:] = batch.loss_mask[:, :-1]
    return dataclasses.replace(
        batch, loss_mask=np.where(batch.segment_ids > 0, mask, 0).astype(np.float32)
    )


def test_token_aligned_arrays_passed_as_target_aligned():
    wrong = unshifted(BATCH)
    with pytest.raises(
        ValueError, match=r"loss_mask: .* at the last position of a sequence.*from_token_aligned"
    ):
        wrong.validate(V)
    loss, found = jax.jit(loss_at)(wrong)
    assert np.isnan(loss)
    assert "loss_mask_on_last_position" in str(explain_broken_rules(found["broken_rules"].value))
    right = RolloutBatch.from_target_aligned(
        wrong.tokens, wrong.targets, wrong.segment_ids, wrong.positions, wrong.loss_mask
    )
    assert np.isfinite(loss_from_stats(TokenStats(LOG_PROBS), right, SFT())[0])


def test_a_loss_of_each_kind_is_poisoned_with_its_gradient():
    wrong = unshifted(BATCH)
    x = LOG_PROBS
    wrong = dataclasses.replace(wrong, values=wrong.advantages, returns=wrong.advantages)
    hidden = jnp.asarray(RNG.normal(size=(*x.shape, H)), jnp.float32)

    def of_policy(x):
        return loss_at(wrong, x)

    def of_sft(x):
        return loss_from_stats(TokenStats(x), wrong, SFT())

    def of_values(x):
        return loss_from_stats(x, wrong, Value())

    def from_hidden(hidden, memory):
        return policy_loss_from_hidden(hidden, KERNEL, wrong, CONFIG, memory=memory)

    for loss, at in (
        (of_policy, x),
        (of_sft, x),
        (of_values, x),
        (partial(from_hidden, memory=2**30), hidden),
        (partial(from_hidden, memory=2**15), hidden),
    ):
        (value, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(at)
        assert np.isnan(value)
        assert np.isnan(gradient).any()
        (line,) = explain_broken_rules(found["broken_rules"].value)
        assert line.startswith("loss_mask_on_last_position: ")


# Parts of a step


def stacked():
    return packed(micro_batches=2, rows=4)


def slice_of(batch, k):
    def part(x):
        return x[k]

    return jax.tree.map(part, batch)


def sft_of(batch, x):
    return loss_from_stats(TokenStats(x), batch, SFT())


def value_of(batch, x):
    return loss_from_stats(x, batch, Value())


@pytest.mark.parametrize("loss", [loss_at, sft_of, value_of])
def test_a_slice_of_stacked_batches_without_a_normalizer(loss):
    """Without the check: 0.294 for 0.251, and 27% off in the head's gradient."""
    batches = stacked()
    batches = dataclasses.replace(batches, values=batches.advantages, returns=batches.advantages)
    with pytest.raises(
        ValueError, match=r"normalizer: got None for one of 2 micro-batches, expected the step's"
    ):
        loss(slice_of(batches, 0), LOG_PROBS[:4])
    one = dataclasses.replace(slice_of(batches, 0), micro_batches=None)
    loss(one, LOG_PROBS[:4])


def test_accumulation_cannot_be_passed_by_a_function_that_was_traced_before():
    """Without the check: a loss_fn that was jitted and called before gave -3.0 instead of -2.625
    for these.
    """
    batches = stacked()
    plain = dataclasses.replace(batches, micro_batches=None)

    @jax.jit
    def loss_fn(x, batch):
        return loss_at(batch, x)

    loss_fn(LOG_PROBS[:4], slice_of(plain, 0))
    with pytest.raises(ValueError, match="normalizer: got None inside accumulate_gradients"):
        accumulate_gradients(loss_fn, plain)(LOG_PROBS[:4])
    names = (
        "tokens",
        "targets",
        "segment_ids",
        "positions",
        "loss_mask",
        "sample_ids",
        "advantages",
        "old_log_probs",
    )
    arrays = {name: getattr(plain, name) for name in names}

    @jax.jit
    def from_arrays(x, arrays):
        return loss_at(RolloutBatch(**arrays), x)

    from_arrays(LOG_PROBS[:4], slice_of(arrays, 0))
    with pytest.raises(ValueError, match="normalizer: got None inside accumulate_gradients"):
        accumulate_gradients(from_arrays, arrays)(LOG_PROBS[:4])
    from_arrays(LOG_PROBS[:4], slice_of(arrays, 0))  # outside, it still is a step of its own


def test_a_normalizer_that_does_not_fit():
    batches = stacked()
    normalizers = Normalizer.of(SFT(), batches)
    with pytest.raises(
        ValueError, match=r"normalizer: got tokens of shape \(2,\), .* its part of each field"
    ):
        loss_at(slice_of(batches, 0), LOG_PROBS[:4], normalizer=normalizers)
    of_another = PolicyLossConfig(aggregation="sequence_mean_token_mean")
    with pytest.raises(
        ValueError, match="normalizer: got one of aggregation 'token_mean', expected 'seq"
    ):
        loss_at(
            slice_of(batches, 0), LOG_PROBS[:4], of_another, normalizer=slice_of(normalizers, 0)
        )


# Meshes, layouts, groups, statistics


def test_a_mesh_whose_axes_have_no_role():
    """Without the check: all replicated, 8 times the work."""
    mesh = jax.make_mesh((4, 2), ("workers", "shards"), (jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(
        ValueError, match=r"mesh: got axes workers=4, shards=2, expected a role for each"
    ):
        ParallelMesh(mesh)


@pytest.mark.parametrize("group_id", [None, "some"])
def test_a_group_id_that_was_left_out(group_id):
    """Without the check: each sample was its own group, and every advantage 0."""
    given = samples(group_id=None)
    if group_id is not None:
        given[0] = dataclasses.replace(given[0], group_id=3)
        with pytest.raises(
            ValueError,
            match="group_id: got None in sample 1, expected a value in all samples or in",
        ):
            RolloutBatch.from_samples(given, row_length=T)
        return
    batch = RolloutBatch.from_samples(given, row_length=T)
    with pytest.raises(
        ValueError, match=r"group_ids: got None in grpo, .* give every Sample its group_id"
    ):
        advantages.grpo(batch.rewards, batch.group_ids)


@pytest.mark.parametrize("packed_for", [None, "dp=2,cp=4"])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_packed_for_another_layout_or_other_shards(packed_for, jitted):
    """Without the check: wrong GAE."""
    layout = {}
    if packed_for is not None:
        layout["parallel"] = make_parallel_mesh(packed_for, context_layout="zigzag")
    batch = packed(row_length=16, rows=8, **layout)
    zigzag = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")

    def gae(b):
        return advantages.gae(b.advantages, b.advantages, b, parallel=zigzag)

    def loss(b):
        return policy_loss(TokenStats(b.old_log_probs), b, CONFIG, parallel=zigzag)[0]

    def normalizer(b):
        return Normalizer.of(SFT(), b, parallel=zigzag).tokens

    def put(b):
        return b.put(zigzag)

    calls = {"gae": gae, "loss": loss, "normalizer": normalizer, "put": put}
    for name, call in calls.items():
        run = jax.jit(call) if jitted and name != "put" else call
        with pytest.raises(
            ValueError,
            match=r"batch: got rows packed for context layout .* expected 'zigzag' over 2",
        ):
            run(batch)
    contiguous = make_parallel_mesh("dp=2,cp=2,tp=2")
    if packed_for is None:  # rows in logical order suit any number of contiguous shards
        assert np.isfinite(
            policy_loss(TokenStats(batch.old_log_probs), batch, CONFIG, parallel=contiguous)[0]
        )


def test_a_call_that_forgets_the_mesh():
    """Without the check: told to give the constructor what it had been given."""
    zigzag = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")
    batch = packed(row_length=16, rows=8, parallel=zigzag)
    calls = (
        partial(advantages.gae, batch.advantages, batch.advantages, batch),
        partial(loss_at, batch, batch.old_log_probs),
        partial(Normalizer.of, SFT(), batch),
    )
    for call in calls:
        with pytest.raises(
            ValueError,
            match=r"expected 'contiguous' over 1, .* this call lacks parallel=, the mesh",
        ):
            call()
        call(parallel=zigzag)
    with pytest.raises(
        ValueError, match="give the batch's constructor and this call the same parallel="
    ):
        loss_at(packed(row_length=16, rows=8), jnp.zeros((8, 16)), parallel=zigzag)


# Log-probs of 16 bits


IDS = np.ones((2, 4), np.int32)


def old_of(dtype):
    """The batch with old log-probs of the dtype."""
    return dataclasses.replace(BATCH, old_log_probs=BATCH.old_log_probs.astype(dtype))


def reference_of(dtype):
    """The batch with a reference's log-probs of the dtype."""
    return dataclasses.replace(BATCH, ref_log_probs=BATCH.old_log_probs.astype(dtype))


def in_a_sample(x):
    return Sample([1, 2, 3], 1, old_log_probs=np.asarray(x[0, :2]))


def in_padded_rows(x):
    return RolloutBatch.from_padded(IDS, IDS, IDS, ref_log_probs=x)


def in_token_aligned_rows(x):
    return RolloutBatch.from_token_aligned(IDS, IDS, IDS, IDS, ref_log_probs=x)


def in_target_aligned_rows(x):
    return RolloutBatch.from_target_aligned(IDS, IDS, IDS, IDS, IDS, old_log_probs=x)


def in_rows_of_lengths(x):
    ends = np.array([[0, 4]] * 2)
    return RolloutBatch.from_cu_seqlens(IDS, ends, IDS, aligned="token", old_log_probs=x)


def in_a_loss(x):
    return loss_at(old_of(x.dtype))


def in_statistics(x):
    return loss_at(BATCH, LOG_PROBS.astype(x.dtype))


def in_a_loss_from_hidden(x):
    hidden = np.ones((*BATCH.tokens.shape, H), np.float32)
    return policy_loss_from_hidden(hidden, KERNEL, reference_of(x.dtype), CONFIG)


def in_a_normalizer(x):
    return Normalizer.of(SFT(), reference_of(x.dtype))


def in_mismatch_metrics(x):
    batch = dataclasses.replace(BATCH, rollout_log_probs=BATCH.old_log_probs)
    return mismatch_metrics(batch, LOG_PROBS.astype(x.dtype))


def in_proximal_log_probs(x):
    return proximal_log_probs(x, x, IDS, 3)


def in_validate(x):
    return old_of(x.dtype).validate(V)


ROUNDED = {
    "Sample": in_a_sample,
    "from_padded": in_padded_rows,
    "from_token_aligned": in_token_aligned_rows,
    "from_target_aligned": in_target_aligned_rows,
    "from_cu_seqlens": in_rows_of_lengths,
    "policy_loss": in_a_loss,
    "its statistics": in_statistics,
    "policy_loss_from_hidden": in_a_loss_from_hidden,
    "Normalizer": in_a_normalizer,
    "mismatch_metrics": in_mismatch_metrics,
    "proximal_log_probs": in_proximal_log_probs,
    "validate": in_validate,
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("entry", ROUNDED)
def test_log_probs_of_16_bits(entry, dtype):
    """Without the check: taken as they were; the on-policy ratio was between 0.98 and 1.02."""
    with pytest.raises(TypeError, match=r"\w+: got dtype (b?float16), expected float32"):
        ROUNDED[entry](jnp.full((2, 4), -1.3, dtype))
    ROUNDED[entry](np.full((2, 4), -1.3, np.float32))


def test_a_bonus_on_statistics_without_a_gradient():
    """Without the check: it had no effect, and no error said so."""
    stats = TokenStats(LOG_PROBS, jnp.ones_like(LOG_PROBS), entropy_mode="metric")
    config = PolicyLossConfig(entropy_coef=0.1)
    with pytest.raises(
        ValueError, match=r"stats: got entropies of mode 'metric', .* entropy=config.entropy_mode"
    ):
        policy_loss(stats, BATCH, config)
    assert TokenStats(LOG_PROBS).entropy_mode == "none"
    assert TokenStats(LOG_PROBS, LOG_PROBS).entropy_mode == "bonus"
    found = log_probs_from_hidden(HIDDEN, KERNEL, jnp.zeros((R, T), jnp.int32), entropy="metric")
    assert found.entropy_mode == "metric"


def test_a_square_kernel_wants_a_layout():
    """Without the check: a transposed one was read the wrong way round."""
    with pytest.raises(ValueError, match=r"layout: got None for a kernel \(6, 6\), expected 'hv'"):
        Head(jnp.ones((6, 6)))
    assert Head(jnp.ones((6, 6)), layout="vh").layout == "vh"


# Samples


BAD_SAMPLES = {
    "a uuid as group": (
        {"group_id": "3f2a"},
        TypeError,
        "group_id: got '3f2a', expected an integer",
    ),
    "a wide group": (
        {"group_id": 2**40},
        ValueError,
        "group_id: got 1099511627776, expected 0 to 2147483647",
    ),
    "a negative sample": ({"sample_id": -1}, ValueError, "sample_id: got -1, expected 0 to"),
    "rewards per token": (
        {"reward": [0.0, 1.0]},
        TypeError,
        "reward: got .* expected one finite number for the whole",
    ),
    "an infinite reward": (
        {"reward": float("-inf")},
        TypeError,
        "reward: got -inf, expected one finite number",
    ),
    "float tokens": (
        {"tokens": [1.0, 2.0, 3.0]},
        TypeError,
        "tokens: got float64 .* expected integers",
    ),
    "negative tokens": (
        {"tokens": [1, -100, 3]},
        ValueError,
        "tokens: got -100 to 3, expected 0 to",
    ),
    "missing log-probs": (
        {"rollout_log_probs": [None, -1.0]},
        TypeError,
        "rollout_log_probs: got None among them",
    ),
    "a fractional mask": (
        {"loss_mask": [0, 1, 0.1]},
        ValueError,
        r"loss_mask: got \[0, 1, 0.1\], expected 0 and 1",
    ),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_samples_that_cannot_be(name):
    given, error, message = BAD_SAMPLES[name]
    with pytest.raises(error, match=message):
        Sample(**{"tokens": [1, 2, 3], "response_start": 1} | given)


def test_equal_sample_ids():
    """Without the check: passed `validate`, and mixed up what was recorded for them."""
    given = [dataclasses.replace(s, sample_id=i // 2) for i, s in enumerate(samples())]
    with pytest.raises(
        ValueError, match="sample_id: got 0 for samples 0 and 1, expected one of its own"
    ):
        RolloutBatch.from_samples(given, row_length=T)
    ids = np.where(BATCH.sample_ids >= 0, 0, -1)
    with pytest.raises(
        ValueError, match=r"sample_ids: got 0 at row \d, segment \d, expected an id of its own"
    ):
        dataclasses.replace(BATCH, sample_ids=ids).validate(V)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float16])
def test_a_mask_of_any_dtype(dtype):
    """Without the check: a bare error in gspo, gmpo and sequence masking."""
    cast = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask.astype(dtype))
    for config in (
        PolicyLossConfig(GSPO()),
        PolicyLossConfig(GMPO()),
        PolicyLossConfig(off_policy=OffPolicyConfig(opsm_delta=0.0)),
    ):
        expected, _ = loss_at(BATCH, config=config)
        got, _ = loss_at(cast, config=config)
        np.testing.assert_array_equal(got, expected)

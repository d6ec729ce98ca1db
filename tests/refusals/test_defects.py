"""Defects of an earlier version of jaxppo, with the wrong numbers that they gave: none may come
back.

`ELSEWHERE` names the tests of defects that are not in this file. Defects of other systems:
test_known_defects.py.
"""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle.advantages as truth
import pytest
from defect_steps import BATCH, HIDDEN, KERNEL, LOG_PROBS, MIXED, RNG, H
from jax import lax
from plain_head import reference_from_hidden
from programs import compilations

from jaxppo import (
    KL,
    SFT,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    advantages,
    finalize_metrics,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.base.kl import kl_divergence
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.distillation import distillation_loss
from jaxppo.losses.mtp import MTP, mtp_loss
from jaxppo.mismatch import mismatch_metrics
from jaxppo.policy_losses import DPPO, ClipCov
from jaxppo.sharding import redistribute
from sharding import make_parallel_mesh, scan_affine, segment_sum, shift_left

ELSEWHERE = {
    "gradients accumulated by a loss_fn that was traced before": (
        "test_misuse",
        "test_accumulation_cannot_be_passed_by_a_function_that_was_traced_before",
    ),
    "logits whose vocabulary the tensor axis does not divide": (
        "test_from_logits",
        "test_a_vocabulary_that_the_tensor_axis_does_not_divide",
    ),
    "equal sample ids": ("test_misuse", "test_equal_sample_ids"),
    "a mask of bool in gspo, gmpo and sequence masking": (
        "test_misuse",
        "test_a_mask_of_any_dtype",
    ),
    "uuids, wide ids, rewards per token, float tokens, None among log-probs": (
        "test_misuse",
        "test_samples_that_cannot_be",
    ),
    "a normalizer that was not sliced": ("test_misuse", "test_a_normalizer_that_does_not_fit"),
    "dimensions of 0 and fp8 in heads": ("test_log_probs_inputs", "test_of_hidden_states"),
    "a k3 below 0 of policies that agree, in rejections": (
        "test_off_policy",
        "test_k3_accepts_what_agrees_to_rounding",
    ),
    "hosts whose batches differ in size": (
        "test_multihost",
        "test_processes_end_with_the_numbers_of_one_device",
    ),
}


@pytest.mark.parametrize("defect", ELSEWHERE)
def test_the_tests_elsewhere_are_there(defect):
    module, name = ELSEWHERE[defect]
    (path,) = Path(__file__).parents[1].rglob(f"{module}.py")
    assert f"def {name}(" in path.read_text()


def one_token_samples(rollouts):
    values = {"advantages": [1.0], "old_log_probs": [-1.0]}
    return [Sample([1, 2], response_start=1, rollout_id=r, **values) for r in rollouts]


@pytest.mark.every(3)
@pytest.mark.parametrize("mesh", [None, "dp=8", MIXED])
@pytest.mark.parametrize("seed", [0, 1])
def test_1_rollouts_of_three_and_of_one(mesh, seed):
    """If the id of empty slots sorted among the others, denominators were those of the wrong
    rollouts.
    """
    rollouts = np.random.default_rng(seed).permutation([7, 7, 7, 9])
    parallel = mesh and make_parallel_mesh(mesh)
    batch = RolloutBatch.from_samples(
        one_token_samples(rollouts), row_length=4, rows=8, parallel=parallel
    )
    normalizer = Normalizer.of(SFT(aggregation="rollout_mean"), batch, parallel=parallel)
    there = batch.sample_ids >= 0
    np.testing.assert_array_equal(
        normalizer.denominators, np.where(there, np.where(batch.rollouts == 7, 3, 1), 0)
    )
    assert normalizer.sequences == 2
    stats = TokenStats(np.full(batch.loss_mask.shape, -1.0, np.float32))
    config = PolicyLossConfig(aggregation="rollout_mean")
    loss, _ = policy_loss(stats, batch, config, parallel=parallel)
    assert loss == -1


def part_of(tree, k):
    """One part of each array of a tree."""

    def part(x):
        return x[k]

    return jax.tree.map(part, tree)


@pytest.mark.parametrize("micro_batches", [None, 4])
def test_1_twenty_four_samples_in_rollouts_of_three(micro_batches):
    rollouts = np.random.default_rng(2).permutation(np.arange(24) // 3)
    batch = RolloutBatch.from_samples(
        one_token_samples(rollouts), row_length=6, micro_batches=micro_batches
    )
    normalizer = Normalizer.of(SFT(aggregation="rollout_mean"), batch)
    np.testing.assert_array_equal(normalizer.denominators, np.where(batch.sample_ids >= 0, 3, 0))
    assert (np.asarray(normalizer.sequences) == 8).all()
    config = PolicyLossConfig(aggregation="rollout_mean")
    parts = [(batch, normalizer)]
    if micro_batches:
        parts = [part_of((batch, normalizer), k) for k in range(micro_batches)]

    @jax.jit
    def loss_of_part(batch, normalizer):
        stats = TokenStats(jnp.full(batch.loss_mask.shape, -1.0))
        return policy_loss(stats, batch, config, normalizer=normalizer)[0]

    losses = [loss_of_part(*part) for part in parts]
    assert sum(losses) == pytest.approx(-1, rel=1e-6)


def test_2_every_k3_of_policies_that_agree_is_small_and_not_negative():
    """exp(d) - 1 - d in f32 was -6e-8 to 6e-8 for d of 1e-4; exactly, it is d^2 / 2 = 5e-9.

    expm1(d) is rounded to a neighbour of d, so each value is known to two of them.
    """
    d = np.asarray(1e-4 * np.random.default_rng(2).normal(size=(8, 8)), np.float32)
    rollout = np.asarray(-1 - np.zeros_like(d), np.float32)
    old = rollout + d
    exact = np.expm1(np.float64(old) - rollout) - (np.float64(old) - rollout)
    counted = BATCH.loss_mask > 0
    batch = dataclasses.replace(
        BATCH, old_log_probs=old, rollout_log_probs=rollout, ref_log_probs=old
    )
    found = kl_divergence(rollout, old, "k3")
    assert (np.abs(found - exact) < 2 * np.spacing(np.abs(d)) + 1e-13).all()
    assert (found >= 0).all()
    for low, rejected in ((0.0, 0.0), (1e-3, 1.0)):
        rejections = tuple(
            Rejection(f"{level}_k3", low=low, high=1.0)
            for level in ("token", "seq_mean", "seq_max")
        )
        config = PolicyLossConfig(
            kl=KL(1.0, "k3"), off_policy=OffPolicyConfig(rejections=rejections)
        )
        _, values = policy_loss(TokenStats(jnp.asarray(rollout)), batch, config)
        assert values["rejected_fraction"].value == rejected
    for name, x in (("kl", values["kl"]), ("mismatch", mismatch_metrics(batch)["k3_kl"])):
        assert x.value == pytest.approx(exact[counted].mean(), rel=1e-2), name


KEY = jax.random.key(0)
LOGITS = np.asarray(HIDDEN) @ np.asarray(KERNEL)


def loss_of(function, *given, **options):
    """The loss alone, of a function that returns its metrics too."""
    return function(*given, **options)[0]


def tokens_of_depths(**on):
    return [normalizer.tokens for normalizer in Normalizer.of(MTP(1), BATCH, **on)]


def denominators(**on):
    return Normalizer.of(SFT(aggregation="rollout_mean"), BATCH, **on).denominators


def metrics_of_mismatch(**on):
    return finalize_metrics(mismatch_metrics(BATCH, **on))


def targets_of_padded(**on):
    prompts = BATCH.tokens[:, :4]
    completions = BATCH.tokens[:, 4:]
    return RolloutBatch.from_padded(prompts, completions, BATCH.loss_mask[:, 4:], **on).targets


def targets_of_tokens(**on):
    rows = (BATCH.tokens, BATCH.segment_ids, BATCH.positions, BATCH.loss_mask)
    return RolloutBatch.from_token_aligned(*rows, **on).targets


def eager_calls(parallel):
    p = {"parallel": parallel}
    config = PolicyLossConfig(kl=KL(0.1), entropy_coef=0.1)
    x = LOG_PROBS
    stats = TokenStats(x)
    states = (HIDDEN, KERNEL)
    segments = {"segment_ids": BATCH.segment_ids, "parallel": parallel}
    selecting = PolicyLossConfig(ClipCov())
    of_hidden = partial(loss_of, policy_loss_from_hidden, batch=BATCH, config=config, **p)
    gradient = jax.grad(partial(of_hidden, head=KERNEL))
    return {
        "log_probs_from_hidden": partial(
            log_probs_from_hidden, *states, BATCH.targets, entropy="bonus", **p
        ),
        "log_probs_from_logits": partial(log_probs_from_logits, LOGITS, BATCH.targets, **p),
        "policy_loss_from_hidden": partial(of_hidden, *states),
        "its gradient": partial(gradient, HIDDEN),
        "policy_loss": partial(loss_of, policy_loss, stats, BATCH, PolicyLossConfig(), **p),
        "SFT": partial(loss_of, loss_from_stats, stats, BATCH, SFT(), **p),
        "SFT from hidden": partial(loss_of, loss_from_hidden, *states, BATCH, SFT(), **p),
        "Value": partial(loss_of, loss_from_stats, x, BATCH, Value(), **p),
        "mtp_loss": partial(loss_of, mtp_loss, HIDDEN[None], KERNEL, BATCH, **p),
        "Normalizer.of depths": partial(tokens_of_depths, **p),
        "distillation_loss": partial(loss_of, distillation_loss, *states, *states, BATCH, **p),
        "mismatch_metrics": partial(metrics_of_mismatch, **p),
        "covariance_mask": partial(covariance_mask, stats, BATCH, selecting, KEY, **p),
        "normalizer": partial(denominators, **p),
        "gae": partial(advantages.gae, x, x, BATCH, **p),
        "discounted_returns": partial(advantages.discounted_returns, x, BATCH, **p),
        "token_rewards": partial(advantages.token_rewards, BATCH.rewards, BATCH, **p),
        "whiten": partial(advantages.whiten, x, BATCH.loss_mask, **p),
        "grpo": partial(advantages.grpo, BATCH.rewards, BATCH.group_ids, **p),
        "pass_at_k": partial(advantages.pass_at_k, BATCH.rewards, BATCH.group_ids, **p),
        "redistribute": partial(redistribute, x, parallel, "contiguous", "striped"),
        "shift_left": partial(shift_left, x, by=2, fill=0.0, **segments),
        "scan_affine": partial(scan_affine, 0.5, x, **segments),
        "segment_sum": partial(segment_sum, x, num_segments=4, **segments),
        "from_padded": partial(targets_of_padded, **p),
        "from_token_aligned": partial(targets_of_tokens, **p),
    }


@pytest.mark.every(7)
@pytest.mark.parametrize("name", eager_calls(None))
@pytest.mark.parametrize("mesh", [None, MIXED])
def test_3_eager_calls_work_and_the_second_compiles_nothing(name, mesh):
    """Calls from hidden states on a mesh raised outside jit and grad; others compiled anew each
    time.
    """
    parallel = None if mesh is None else make_parallel_mesh(mesh)
    call = eager_calls(parallel)[name]
    first = call()
    assert compilations(call) == 0
    # a mesh made anew, as in each step of a loop, is the same mesh
    again = None if mesh is None else make_parallel_mesh(mesh)
    assert compilations(eager_calls(again)[name]) == 0
    on_one_device = eager_calls(None)[name]()
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(on_one_device), strict=True):
        if name != "redistribute":  # on one device all layouts are one
            # a small element of a gradient is what large ones leave of each other
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=max(2e-6, 2e-7 * np.abs(y).max()))


def hessian_vector(loss, kernel, v):
    """In reverse mode twice; None where that is refused by name."""

    def along(k):
        return (jax.grad(loss)(k) * v).sum()

    try:
        return jax.jit(jax.grad(along))(kernel)
    except NotImplementedError as refused:
        assert "second derivatives" in str(refused)  # noqa: PT017
        return None


@pytest.mark.every(5)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("mesh", [None, MIXED])
def test_4_curvature_of_the_kl_at_the_old_policy(estimator, mesh):
    """There the KL and its gradient are 0, and a rule whose gradient is linear in its cotangent
    gave a Hessian of 0.
    """
    parallel = mesh and make_parallel_mesh(mesh)
    targets = jnp.asarray(BATCH.targets)
    v = jnp.asarray(RNG.normal(size=KERNEL.shape), jnp.float32)

    def plain(k):
        return reference_from_hidden(HIDDEN, k, targets).log_probs

    reference = plain(KERNEL)
    batch = dataclasses.replace(
        BATCH, ref_log_probs=reference, old_log_probs=reference, advantages=0 * reference
    )
    config = PolicyLossConfig(kl=KL(1.0, estimator), aggregation="token_sum")
    p = {"parallel": parallel}

    def of_reference(k):
        return policy_loss(TokenStats(plain(k)), batch, config)[0]

    def of_logits(k):
        stats = log_probs_from_logits(HIDDEN @ k, targets, **p)
        return policy_loss(stats, batch, config, **p)[0]

    def of_hidden(k):
        stats = log_probs_from_hidden(HIDDEN, k, targets, **p)
        return policy_loss(stats, batch, config, **p)[0]

    def of_one_call(k):
        return policy_loss_from_hidden(HIDDEN, k, batch, config, **p)[0]

    expected = hessian_vector(of_reference, KERNEL, v)
    assert jnp.abs(expected).sum() > 10
    ways = {"logits": of_logits, "hidden": of_hidden, "one call": of_one_call}
    for name, loss in ways.items():
        got = hessian_vector(loss, KERNEL, v)
        assert got is not None or name != "logits"
        if got is not None:
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("mesh", [None, MIXED])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.3, 3.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_5_accuracy_of_the_likeliest_tokens_is_1(mesh, temperature, dtype):
    """The target's logit was compared with the maximum, but divided by the temperature in
    another fusion.
    """
    parallel = mesh and make_parallel_mesh(mesh)
    z = (8 * jax.random.normal(jax.random.key(0), (4, 64, 500))).astype(dtype)
    options = {"temperature": temperature, "logit_stats": ("accuracy",), "parallel": parallel}
    stats = jax.jit(partial(log_probs_from_logits, **options))(z, z.argmax(-1))
    np.testing.assert_array_equal(stats.accuracy, 1)
    assert (stats.log_probs <= 0).all()


@pytest.mark.parametrize("mesh", [None, MIXED])
@pytest.mark.parametrize("temperature", [0.1, 0.7])
def test_5_no_log_prob_is_above_0(mesh, temperature):
    """The tokens have probabilities of nearly 1."""
    parallel = mesh and make_parallel_mesh(mesh)
    hidden = np.asarray(jax.random.normal(jax.random.key(0), (8, 8, 64)))
    kernel = np.asarray(jax.random.normal(jax.random.key(1), (64, 300)))
    targets = (hidden @ kernel).argmax(-1).astype(np.int32)
    p = {"parallel": parallel, "temperature": temperature}
    ids = {"nucleus_ids": np.stack([targets, targets * 0], -1)}
    mask = np.ones((8, 8), np.float32)
    mask[:, -1] = 0
    segments = np.ones((8, 8), np.int32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (8, 8))
    samples = np.arange(8, dtype=np.int32)[:, None]
    batch = RolloutBatch(targets, targets, segments, positions, mask, samples)

    def of_hidden(h, k, **options):
        return log_probs_from_hidden(h, k, targets, **options, **p).log_probs

    def of_logits(h, k):
        return log_probs_from_logits(h @ k, targets, **p).log_probs

    for call in (of_hidden, partial(of_hidden, **ids), of_logits):
        log_probs = jax.jit(call)(hidden, kernel)
        assert (log_probs <= 0).all()
        assert (log_probs > -1e-6).any()
    each = np.eye(8, dtype=np.float32)[:, :, None] * mask[None]  # one row at a time

    def of_row(m):
        row = dataclasses.replace(batch, loss_mask=m)
        return loss_from_hidden(hidden, kernel, row, SFT(), **p)[0]

    assert (lax.map(of_row, each) >= 0).all()


@pytest.mark.parametrize("name", ["grpo", "pass_at_k", "rloo", "opo", "gpg", "standardize"])
def test_7_five_thousand_samples_in_any_order(name):
    """[186, 256] slots took the square of their number: 9 GB."""
    rng = np.random.default_rng(4)
    slots = 186 * 256
    count = 5000
    rewards = rng.normal(size=count).astype(np.float32)
    ids = rng.integers(0, 700, count)
    lengths = rng.integers(1, 9, count)
    more = ["lengths"] * (name == "opo")
    known = {"lengths": lengths} if more else {}
    expected = getattr(truth, name)(rewards, ids, **known)
    where = rng.permutation(slots)[:count]

    def placed(x, fill, dtype):
        out = np.full(slots, fill, dtype)
        out[where] = x
        return jnp.asarray(out.reshape(186, 256))

    given = [placed(rewards, np.nan, np.float32), placed(ids, -1, np.int32)]
    given += [placed(lengths, np.nan, np.float32)] if more else []
    compiled = jax.jit(getattr(advantages, name)).lower(*given).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100 * slots
    got = np.asarray(compiled(*given)).reshape(-1)
    np.testing.assert_allclose(got[where], expected, rtol=1e-4, atol=1e-4)
    assert not np.delete(got, where).any()


@pytest.mark.every(3)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mesh", [None, MIXED])
def test_8_losses_from_hidden_states_with_x64(frozen, mesh):
    """A frozen head's loss in one pass mixed i32 and i64."""
    parallel = mesh and make_parallel_mesh(mesh)

    def loss(hidden, kernel):
        if frozen:
            kernel = lax.stop_gradient(kernel)
        given = (hidden, kernel, BATCH, PolicyLossConfig())
        return policy_loss_from_hidden(*given, parallel=parallel)[0]

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    expected = step(HIDDEN, KERNEL)
    with jax.enable_x64(True):
        got = step(HIDDEN, KERNEL)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32"])
@pytest.mark.parametrize("mesh", [None, MIXED])
def test_8_narrow_targets_of_a_wide_vocabulary(dtype, mesh):
    """70000 columns wrap around in uint16: a target of 4464 was found in column 70000 too."""
    parallel = mesh and make_parallel_mesh(mesh)
    columns = 70000
    most = min(np.iinfo(dtype).max, columns - 1)
    rows = [[0, 1, most // 2, most - 1], [most, columns % (most + 1), 5, 100]]
    targets = jnp.asarray(np.array(rows, np.int32))
    hidden = np.asarray(HIDDEN)[:2, :4]
    kernel = np.random.default_rng(0).normal(size=(H, columns)).astype(np.float32)
    for call in (
        partial(log_probs_from_hidden, hidden, kernel, parallel=parallel),
        partial(log_probs_from_logits, hidden @ kernel, parallel=parallel),
    ):
        expected = call(targets).log_probs
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(call(targets.astype(dtype)).log_probs, expected)


# Found by the search against the oracle


def test_the_slope_of_a_distance_is_0_where_policies_agree():
    """The slope of jnp.abs is 1 there."""

    def total(x):
        return kl_divergence(x, jnp.full(3, -2.0), "abs").sum()

    slope = jax.grad(total)
    np.testing.assert_array_equal(slope(jnp.array([-3.0, -2.0, -1.0])), [-1, 0, 1])


def test_tokens_of_advantage_0_are_not_clipped_by_dppo():
    x = np.array([[-3.0, -0.1]], np.float32)
    old = np.array([[-0.1, -3.0]], np.float32)
    loss = jax.jit(DPPO(clip_low=0.1, clip_high=0.1))
    result, indicators = loss(x, old, np.zeros((1, 2), np.float32))
    assert not indicators["clip_fraction"].any()
    assert not result.any()


def test_opo_of_a_group_without_a_token():
    rewards = np.array([[1.0, 0.0, 2.0, 4.0]], np.float32)
    groups = np.array([[1, 1, 2, 2]], np.int32)
    lengths = np.array([[0.0, 0.0, 1.0, 1.0]], np.float32)
    got = advantages.opo(rewards, groups, lengths)
    np.testing.assert_array_equal(got, [[0, 0, -1, 1]])


def test_perplexity_ratios_far_from_the_sampler():
    """exp of a mean log-ratio of 100 is inf in f32."""
    far = dataclasses.replace(BATCH, old_log_probs=BATCH.old_log_probs - 100)
    found = finalize_metrics(mismatch_metrics(far))
    assert found["ppl_ratio"] == pytest.approx(np.exp(20), rel=1e-5)

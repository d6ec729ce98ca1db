"""Defects of an earlier version of jaxppo, with the wrong numbers that they gave: none may come
back.

`ELSEWHERE` names the tests of defects that are not in this file. Defects of other systems:
test_known_defects.py.
"""

import dataclasses
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
    stats = TokenStats(jnp.full(batch.loss_mask.shape, -1.0))
    assert (
        policy_loss(stats, batch, PolicyLossConfig(aggregation="rollout_mean"), parallel=parallel)[
            0
        ]
        == -1
    )


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
        parts = [
            jax.tree.map(lambda x, k=k: x[k], (batch, normalizer)) for k in range(micro_batches)
        ]
    losses = [
        policy_loss(TokenStats(jnp.full(b.loss_mask.shape, -1.0)), b, config, normalizer=n)[0]
        for b, n in parts
    ]
    assert sum(losses) == pytest.approx(-1, rel=1e-6)


def test_2_every_k3_of_policies_that_agree_is_small_and_not_negative():
    """exp(d) - 1 - d in f32 was -6e-8 to 6e-8 for d of 1e-4; exactly, it is d^2 / 2 = 5e-9."""
    d = np.asarray(1e-4 * RNG.normal(size=(8, 8)), np.float32)
    rollout = np.asarray(-1 - np.zeros_like(d), np.float32)
    old = rollout + d
    exact = np.expm1(np.float64(old) - rollout) - (np.float64(old) - rollout)
    counted = BATCH.loss_mask > 0
    batch = dataclasses.replace(
        BATCH, old_log_probs=old, rollout_log_probs=rollout, ref_log_probs=old
    )
    found = kl_divergence(rollout, old, "k3")
    np.testing.assert_allclose(found, exact, rtol=1e-2, atol=1e-13)
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


def eager_calls(parallel):
    p = {"parallel": parallel}
    config = PolicyLossConfig(kl=KL(0.1), entropy_coef=0.1)
    x = LOG_PROBS
    kernel = KERNEL
    return {
        "log_probs_from_hidden": lambda: log_probs_from_hidden(
            HIDDEN, kernel, BATCH.targets, entropy="bonus", **p
        ),
        "log_probs_from_logits": lambda: log_probs_from_logits(HIDDEN @ kernel, BATCH.targets, **p),
        "policy_loss_from_hidden": lambda: policy_loss_from_hidden(
            HIDDEN, kernel, BATCH, config, **p
        )[0],
        "its gradient": lambda: jax.grad(
            lambda h: policy_loss_from_hidden(h, kernel, BATCH, config, **p)[0]
        )(HIDDEN),
        "policy_loss": lambda: policy_loss(TokenStats(x), BATCH, config=PolicyLossConfig(), **p)[0],
        "SFT": lambda: loss_from_stats(TokenStats(x), BATCH, SFT(), **p)[0],
        "SFT from hidden": lambda: loss_from_hidden(HIDDEN, kernel, BATCH, SFT(), **p)[0],
        "Value": lambda: loss_from_stats(x, BATCH, Value(), **p)[0],
        "mtp_loss": lambda: mtp_loss(HIDDEN[None], kernel, BATCH, **p)[0],
        "Normalizer.of depths": lambda: [n.tokens for n in Normalizer.of(MTP(1), BATCH, **p)],
        "distillation_loss": lambda: distillation_loss(HIDDEN, kernel, HIDDEN, kernel, BATCH, **p)[
            0
        ],
        "mismatch_metrics": lambda: finalize_metrics(mismatch_metrics(BATCH, **p)),
        "covariance_mask": lambda: covariance_mask(
            TokenStats(x), BATCH, PolicyLossConfig(ClipCov()), jax.random.key(0), parallel
        ),
        "normalizer": lambda: (
            Normalizer.of(SFT(aggregation="rollout_mean"), BATCH, **p).denominators
        ),
        "gae": lambda: advantages.gae(x, x, BATCH, **p),
        "discounted_returns": lambda: advantages.discounted_returns(x, BATCH, **p),
        "token_rewards": lambda: advantages.token_rewards(BATCH.rewards, BATCH, **p),
        "whiten": lambda: advantages.whiten(x, BATCH.loss_mask, **p),
        "grpo": lambda: advantages.grpo(BATCH.rewards, BATCH.group_ids, **p),
        "pass_at_k": lambda: advantages.pass_at_k(BATCH.rewards, BATCH.group_ids, **p),
        "redistribute": lambda: redistribute(x, parallel, "contiguous", "striped"),
        "shift_left": lambda: shift_left(x, parallel, 2, 0.0, BATCH.segment_ids),
        "scan_affine": lambda: scan_affine(0.5, x, parallel, segment_ids=BATCH.segment_ids),
        "segment_sum": lambda: segment_sum(x, BATCH.segment_ids, 4, parallel),
        "from_padded": lambda: (
            RolloutBatch.from_padded(
                BATCH.tokens[:, :4], BATCH.tokens[:, 4:], BATCH.loss_mask[:, 4:], **p
            ).targets
        ),
        "from_token_aligned": lambda: (
            RolloutBatch.from_token_aligned(
                BATCH.tokens, BATCH.segment_ids, BATCH.positions, BATCH.loss_mask, **p
            ).targets
        ),
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
    assert compilations(eager_calls(None if mesh is None else make_parallel_mesh(mesh))[name]) == 0
    for x, y in zip(
        jax.tree.leaves(first), jax.tree.leaves(eager_calls(None)[name]()), strict=True
    ):
        if name != "redistribute":  # on one device all layouts are one
            # a small element of a gradient is what large ones leave of each other
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=max(2e-6, 2e-7 * np.abs(y).max()))


def hessian_vector(loss, kernel, v):
    """In reverse mode twice; None where that is refused by name."""
    try:
        return jax.jit(jax.grad(lambda k: (jax.grad(loss)(k) * v).sum()))(kernel)
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
    expected = hessian_vector(
        lambda k: policy_loss(TokenStats(plain(k)), batch, config)[0], KERNEL, v
    )
    assert jnp.abs(expected).sum() > 10
    ways = {
        "logits": lambda k: policy_loss(
            log_probs_from_logits(HIDDEN @ k, targets, **p), batch, config, **p
        )[0],
        "hidden": lambda k: policy_loss(
            log_probs_from_hidden(HIDDEN, k, targets, **p), batch, config, **p
        )[0],
        "one call": lambda k: policy_loss_from_hidden(HIDDEN, k, batch, config, **p)[0],
    }
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
    stats = jax.jit(lambda z, y: log_probs_from_logits(z, y, **options))(z, z.argmax(-1))
    np.testing.assert_array_equal(stats.accuracy, 1)
    assert (stats.log_probs <= 0).all()


@pytest.mark.parametrize("mesh", [None, MIXED])
@pytest.mark.parametrize("temperature", [0.1, 0.7])
def test_5_no_log_prob_is_above_0(mesh, temperature):
    """The tokens have probabilities of nearly 1."""
    parallel = mesh and make_parallel_mesh(mesh)
    hidden, kernel = (
        jax.random.normal(jax.random.key(i), s) for i, s in ((0, (8, 8, 64)), (1, (64, 300)))
    )
    targets = (hidden @ kernel).argmax(-1)
    p = {"parallel": parallel, "temperature": temperature}
    ids = {"nucleus_ids": jnp.stack([targets, targets * 0], -1)}
    mask = jnp.concatenate([jnp.ones((8, 7)), jnp.zeros((8, 1))], 1)
    segments = jnp.ones((8, 8), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(8), (8, 8))
    batch = RolloutBatch(targets, targets, segments, positions, mask, jnp.arange(8)[:, None])
    for log_probs in (
        jax.jit(lambda h, k: log_probs_from_hidden(h, k, targets, **p).log_probs)(hidden, kernel),
        jax.jit(lambda h, k: log_probs_from_hidden(h, k, targets, **ids, **p).log_probs)(
            hidden, kernel
        ),
        jax.jit(lambda h, k: log_probs_from_logits(h @ k, targets, **p).log_probs)(hidden, kernel),
    ):
        assert (log_probs <= 0).all()
        assert (log_probs > -1e-6).any()
    each = jnp.eye(8)[:, :, None] * mask[None]  # one row at a time

    def of_row(m):
        return loss_from_hidden(
            hidden, kernel, dataclasses.replace(batch, loss_mask=m), SFT(), **p
        )[0]

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
    stop = lax.stop_gradient if frozen else lambda x: x

    def loss(hidden, kernel):
        return policy_loss_from_hidden(
            hidden, stop(kernel), BATCH, PolicyLossConfig(), parallel=parallel
        )[0]

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    expected = step(HIDDEN, KERNEL)
    with jax.enable_x64(True):
        got = step(HIDDEN, KERNEL)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, expected)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32"])
@pytest.mark.parametrize("mesh", [None, MIXED])
def test_8_narrow_targets_of_a_wide_vocabulary(dtype, mesh):
    """70000 columns wrap around in uint16: a target of 4464 was found in column 70000 too."""
    parallel = mesh and make_parallel_mesh(mesh)
    columns = 70000
    most = min(np.iinfo(dtype).max, columns - 1)
    targets = jnp.asarray([[0, 1, most // 2, most - 1], [most, columns % (most + 1), 5, 100]])
    hidden = HIDDEN[:2, :4]
    kernel = jax.random.normal(jax.random.key(0), (H, columns))
    for call in (
        lambda y: log_probs_from_hidden(hidden, kernel, y, parallel=parallel).log_probs,
        lambda y: log_probs_from_logits(hidden @ kernel, y, parallel=parallel).log_probs,
    ):
        expected = call(targets)
        assert jnp.isfinite(expected).all()
        np.testing.assert_array_equal(call(targets.astype(dtype)), expected)


# Found by the search against the oracle


def test_the_slope_of_a_distance_is_0_where_policies_agree():
    """The slope of jnp.abs is 1 there."""
    slope = jax.grad(lambda x: kl_divergence(x, jnp.full(3, -2.0), "abs").sum())
    np.testing.assert_array_equal(slope(jnp.array([-3.0, -2.0, -1.0])), [-1, 0, 1])


def test_tokens_of_advantage_0_are_not_clipped_by_dppo():
    x = jnp.array([[-3.0, -0.1]])
    old = jnp.array([[-0.1, -3.0]])
    result, indicators = DPPO(clip_low=0.1, clip_high=0.1)(x, old, jnp.zeros((1, 2)))
    assert not indicators["clip_fraction"].any()
    assert not result.any()


def test_opo_of_a_group_without_a_token():
    got = advantages.opo(
        jnp.array([[1.0, 0.0, 2.0, 4.0]]),
        jnp.array([[1, 1, 2, 2]]),
        jnp.array([[0.0, 0.0, 1.0, 1.0]]),
    )
    np.testing.assert_array_equal(got, [[0, 0, -1, 1]])


def test_perplexity_ratios_far_from_the_sampler():
    """exp of a mean log-ratio of 100 is inf in f32."""
    far = dataclasses.replace(BATCH, old_log_probs=BATCH.old_log_probs - 100)
    found = finalize_metrics(mismatch_metrics(far))
    assert found["ppl_ratio"] == pytest.approx(np.exp(20), rel=1e-5)

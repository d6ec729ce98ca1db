"""Bad input that an earlier version of jaxppo accepted: each kind is refused, or makes the loss
NaN.
"""

import dataclasses
import uuid
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from defect_steps import BATCH, HIDDEN, KERNEL, LOG_PROBS, V, samples

from jaxppo import (
    GSPO,
    PPO,
    SFT,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    advantages,
    explain_broken_rules,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_stats,
    policy_loss,
)
from jaxppo.policy_losses import GMPO


def without(R=2, T=4, S=1):
    def integers(*s):
        return jnp.zeros(s, jnp.int32)

    def floats(*s):
        return jnp.zeros(s)

    tokens = [integers(R, T)] * 4 + [floats(R, T)] + [integers(R, S)] * 3
    values = dict.fromkeys(("advantages", "old_log_probs", "values", "returns"), floats(R, T))
    return RolloutBatch(*tokens, **values, rewards=floats(R, S))


@pytest.mark.parametrize("size", [{"R": 0}, {"T": 0}, {"S": 0}])
def test_10_batches_of_nothing(size):
    """They gave bare errors of reductions, divisions by zero, or a loss of 0."""
    batch = without(**size)
    x = batch.advantages
    for call in (
        partial(policy_loss, TokenStats(x), batch, PolicyLossConfig()),
        partial(loss_from_stats, TokenStats(x), batch, SFT()),
        partial(loss_from_stats, x, batch, Value()),
        partial(Normalizer.of, SFT(), batch),
        partial(advantages.gae, x, x, batch),
        partial(advantages.token_rewards, batch.rewards, batch),
    ):
        with pytest.raises(
            ValueError, match=r"batch: got rows of shape .* expected at least one row, position"
        ):
            call()


@pytest.mark.parametrize("size", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_10_logits_of_nothing(size):
    with pytest.raises(
        ValueError, match=r"logits: got shape .*, expected \[R, T, V\], each at least 1"
    ):
        log_probs_from_logits(jnp.zeros(size), jnp.zeros(size[:2], jnp.int32))


NOT_IDS = {
    "uuids": (
        np.array([[str(uuid.UUID(int=i)) for i in range(2)]]),
        TypeError,
        "group_ids: got dtype <U36, expected int",
    ),
    "wide": (
        np.array([[0, 2**40]]),
        ValueError,
        "group_ids: got 1099511627776, expected -1 to 2147483647",
    ),
    "equal in i32": (
        np.array([[5, 5 - 2**32]]),
        ValueError,
        "group_ids: got -4294967291, expected -1 to",
    ),
    "floats": (
        np.array([[0.0, 1.0]]),
        TypeError,
        "group_ids: got dtype float64, expected integers",
    ),
    "a list": ([[0, 1]], TypeError, "group_ids: got list, expected an array"),
}


@pytest.mark.parametrize("name", NOT_IDS)
def test_10_ids_that_are_none(name):
    """Ids of 64 bits lost their upper half on the way to the device, and strangers became one
    group.
    """
    ids, error, message = NOT_IDS[name]
    with pytest.raises(error, match=message):
        advantages.grpo(jnp.array([[1.0, 2.0]]), ids)


def test_10_wide_ids_in_batches():
    wide = BATCH.group_ids.astype(np.int64) + 2**32
    with pytest.raises(
        ValueError, match=r"group_ids: got 42949672\d\d, expected integers of at most 2147483647"
    ):
        dataclasses.replace(BATCH, group_ids=wide).validate(V)
    ones = np.ones((1, 2), int)
    with pytest.raises(ValueError, match="group_ids: got 4294967296, expected -1 to"):
        RolloutBatch.from_padded(ones, ones, ones, group_ids=np.array([2**32]))
    dataclasses.replace(BATCH, group_ids=BATCH.group_ids.astype(np.int64)).validate(V)


def test_10_lists_for_arrays():
    for call in (
        partial(advantages.grpo, [[1.0, 2.0]], np.zeros((1, 2), np.int32)),
        partial(advantages.token_rewards, [[1.0]] * 8, BATCH),
        partial(advantages.gae, [[1.0] * 8] * 8, LOG_PROBS, BATCH),
    ):
        with pytest.raises(TypeError, match="rewards: got list, expected an array"):
            call()
    with pytest.raises(
        ValueError, match=r"rewards: got shape \(8, 8\), expected the batch's \[R, S\]"
    ):
        advantages.token_rewards(LOG_PROBS, BATCH)
    with pytest.raises(
        ValueError, match=r"tokens: got \[\[1, 2\], \[3\]\], expected one number for each token"
    ):
        Sample([[1, 2], [3]], response_start=1)


@pytest.mark.parametrize("loss", [PPO(), GSPO(), GMPO()])
def test_10_fractional_masks(loss):
    """gspo and gmpo gave other ratios under a tenth of the mask; such masks are refused."""
    batch = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask * 0.1)
    value, found = policy_loss(TokenStats(LOG_PROBS), batch, PolicyLossConfig(loss))
    assert np.isnan(value)
    assert explain_broken_rules(found["broken_rules"].value)[0].startswith(
        "loss_mask_values: expected 0 or 1"
    )
    with pytest.raises(
        ValueError, match=r"loss_mask: got 0.1\d* at row \d, position \d, expected 0 or 1"
    ):
        batch.validate(V)


@pytest.mark.parametrize("veto", [0.0, 1e-12, 2e-9, 1.0])
def test_10_a_veto_that_nothing_reaches(veto):
    """Ratios are within exp(-20) = 2.06e-9 and up, and a veto below it never fired."""
    with pytest.raises(
        ValueError, match=rf"veto: got {veto}, expected a ratio above 2.1e-09 and below 1"
    ):
        OffPolicyConfig(veto=veto)
    rollout = np.full_like(BATCH.old_log_probs, -0.5)
    batch = dataclasses.replace(BATCH, old_log_probs=rollout - 30, rollout_log_probs=rollout)
    config = PolicyLossConfig(off_policy=OffPolicyConfig(veto=2.2e-9))
    assert policy_loss(TokenStats(LOG_PROBS), batch, config)[1]["veto_fraction"].value == 1


@pytest.mark.parametrize("field", ["tokens", "sequences", "denominators"])
def test_10_a_normalizer_of_which_one_field_was_not_sliced(field):
    """The mean was then over K, or broadcast."""
    batches = RolloutBatch.from_samples(samples(), row_length=8, rows=4, micro_batches=2)
    whole = Normalizer.of(SFT(aggregation="sequence_mean_token_mean"), batches)
    first, one = jax.tree.map(itemgetter(0), (batches, whole))
    wrong = dataclasses.replace(one, **{field: getattr(whole, field)})
    config = PolicyLossConfig(aggregation="sequence_mean_token_mean")
    with pytest.raises(
        ValueError, match=rf"normalizer: got {field} of shape .* each micro-batch its part of each"
    ):
        policy_loss(TokenStats(LOG_PROBS[:4]), first, config, normalizer=wrong)


def test_10_fp8_is_refused():
    hidden, kernel, logits = (
        x.astype(jnp.float8_e4m3fn) for x in (HIDDEN, KERNEL, HIDDEN @ KERNEL)
    )
    for name, call in (
        ("hidden", partial(log_probs_from_hidden, hidden, KERNEL, BATCH.targets)),
        ("head.kernel", partial(log_probs_from_hidden, HIDDEN, kernel, BATCH.targets)),
        ("logits", partial(log_probs_from_logits, logits, BATCH.targets)),
    ):
        with pytest.raises(
            TypeError,
            match=f"{name}: got dtype float8_e4m3fn, expected float32, bfloat16 or float16",
        ):
            call()

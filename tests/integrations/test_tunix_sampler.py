"""Tunix's batches of both forms, with its options against a sampler that differs from the trainer.

The reference is plain JAX on all logits, written from Tunix's formulas; Tunix itself is not needed.
Each option is used, or refused by name: none is dropped.
"""

import dataclasses
import functools
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_head import reference_from_logits
from tunix_batches import (
    ADVANTAGES,
    AGENTIC_METRICS,
    COMPLETION_TOKENS,
    COMPLETIONS,
    LOSS_MASK,
    PAD,
    PROMPTS,
    TOKEN_MASK,
    Attending,
    algo_config,
    example,
    install,
    loss_and_gradient,
)

from jaxppo import KL, PPO, SAPO, OffPolicyConfig, PolicyLossConfig, Rejection, Unusable
from jaxppo.integrations import tunix
from jaxppo.policy_losses import CISPO, KLCov

# 9: no loss, no log-prob
SAMPLED = np.array([[-2.0, -3.5, 9.0, -2.6, 9.0], [-1.2, -3.1, -2.4, 9.0, 9.0]], np.float32)
REFERENCE = np.array([[-2.9, -2.8, 0.0, -2.7, 0.0], [-2.7, -2.9, -3.0, 0.0, 0.0]], np.float32)


@functools.partial(jax.jit, static_argnums=0)
def of_params(graph, params, token_mask):
    """Log-probs of the completions, from all logits: tokens attend to the tokens up to them, and
    positions count tokens.
    """
    model = nnx.merge(graph, params)
    tokens = jnp.concatenate([PROMPTS, COMPLETIONS], axis=1)
    positions = jnp.maximum(jnp.cumsum(token_mask, axis=1) - 1, 0)
    causal = np.tril(np.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    logits, _ = model(tokens, positions, None, causal & token_mask[:, None, :])
    at = PROMPTS.shape[1] - 1
    return reference_from_logits(logits[:, at:-1], jnp.asarray(COMPLETIONS)).log_probs


def log_probs(model, token_mask):
    return of_params(*nnx.split(model), token_mask)


@dataclasses.dataclass(frozen=True)
class Correction:
    """Tunix's options against another sampler, as numbers: what is not asked for has no effect."""

    weighted: bool
    cap: float
    token_gate: tuple[float, float]
    sequence_gate: tuple[float, float]

    @classmethod
    def of(cls, config):
        gate = (config.sampler_rs_min, config.sampler_rs_max)
        open_gate = (0.0, np.inf)
        cap = config.sampler_is_threshold
        return cls(
            weighted=config.sampler_is == "token",
            cap=np.inf if cap is None else cap,
            token_gate=gate if config.sampler_rs == "token" else open_gate,
            sequence_gate=gate if config.sampler_rs == "geometric" else open_gate,
        )


jax.tree_util.register_dataclass(Correction)


@jax.jit
def corrected(x, sampled, correction):
    """The weight of each token: Tunix's, by the ratio of the trainer to the sampler, 0 where one
    is not finite.
    """

    def within(ratio, gate):
        low, high = gate
        return (ratio >= low) & (ratio <= high)

    mask = (LOSS_MASK > 0) & jnp.isfinite(sampled)
    log_ratio = jnp.where(mask, jax.lax.stop_gradient(x) - sampled, 0)
    ratio = jnp.exp(log_ratio)
    mean = jnp.exp(log_ratio.sum(1, keepdims=True) / np.float32(LOSS_MASK.sum(1, keepdims=True)))
    weights = jnp.where(correction.weighted, jnp.minimum(ratio, correction.cap), 1.0)
    kept = within(ratio, correction.token_gate) & within(mean, correction.sequence_gate)
    return jnp.where(mask & kept, weights, 0)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(graph, params, given):
    """Loss and gradient of the mean of sequence means."""
    mask = jnp.asarray(LOSS_MASK, jnp.float32)
    a = ADVANTAGES[:, None]

    def loss(params):
        x = of_params(graph, params, given["token_mask"])
        old = jnp.where(given["ratio_is_1"], jax.lax.stop_gradient(x), given["old"])
        ratio = jnp.exp(jnp.where(mask > 0, x - old, 0))
        clipped = jnp.clip(ratio, 1 - given["epsilon"], 1 + given["epsilon_high"])
        of_tokens = jnp.maximum(-a * ratio, -a * clipped)
        weights = corrected(x, given["sampled"], given["correction"])
        of_tokens *= jnp.where(given["is_corrected"], weights, given["weights"])
        of_tokens += given["beta"] * (x - REFERENCE)
        return jnp.mean((jnp.where(mask > 0, of_tokens, 0)).sum(1) / mask.sum(1))

    return jax.value_and_grad(loss)(params)


def expected(model, config, *, old, weights=None, sampled=None, token_mask=TOKEN_MASK):
    """(loss, gradient) of the mean of sequence means, with k1 to a reference where beta asks for
    it.

    One program has the numbers of all cases: what a case lacks has no effect.
    """
    zeros = np.zeros(LOSS_MASK.shape, np.float32)
    given = {name: getattr(config, name) for name in ("epsilon", "epsilon_high", "beta")}
    given |= {"ratio_is_1": old is None, "old": zeros if old is None else old}
    given |= {"weights": zeros + 1 if weights is None else weights}
    given |= {"is_corrected": sampled is not None}
    given |= {"sampled": zeros if sampled is None else sampled}
    given |= {"correction": Correction.of(config), "token_mask": token_mask}
    return value_and_gradient(*nnx.split(model), given)


def agrees(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=2e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), found[2], wanted[1])


@pytest.mark.parametrize("given", [True, False], ids=["a config of ours", "theirs"])
@pytest.mark.parametrize("new", [True, False], ids=["main", "0.1.7"])
def test_a_batch_of_either_form(monkeypatch, new, given):
    """Before: the flag, the mask and the bound on positions of the main branch were each a
    TypeError.

    0.1.7 takes each id of the padding for padding, of which the new form knows better.
    """
    install(monkeypatch, new=new)
    model = Attending()
    config = algo_config(beta=0.1)
    mine = (
        PolicyLossConfig(PPO(), kl=KL(0.1, "k1"), aggregation="sequence_mean_token_mean")
        if given
        else None
    )
    batch = example(new=new, old_per_token_logps=SAMPLED, ref_per_token_logps=REFERENCE)
    found = loss_and_gradient(tunix.loss_fn(mine), model, batch, config)
    ids = np.concatenate([PROMPTS, COMPLETIONS], axis=1)
    agrees(
        found, expected(model, config, old=SAMPLED, token_mask=TOKEN_MASK if new else ids != PAD)
    )
    other = expected(model, config, old=SAMPLED, token_mask=ids != PAD if new else TOKEN_MASK)
    assert abs(found[0] - other[0]) > 1e-3


OPTIONS = {
    "weights": {"sampler_is": "token"},
    "weights, a low cap": {"sampler_is": "token", "sampler_is_threshold": 0.5},
    "weights, no cap": {"sampler_is": "token", "sampler_is_threshold": None},
    "a gate for tokens": {"sampler_rs": "token", "sampler_rs_min": 0.5, "sampler_rs_max": 1.5},
    "a gate for sequences": {
        "sampler_rs": "geometric",
        "sampler_rs_min": 0.0,
        "sampler_rs_max": 0.9,
    },
    "both": {
        "sampler_is": "token",
        "sampler_rs": "geometric",
        "sampler_rs_min": 0.5,
        "sampler_rs_max": 0.9,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_that_are_left_to_the_loss(monkeypatch, options):
    """Ratio 1, weights by current / sampler; the penalty and the denominators of gated tokens
    stay.
    """
    install(monkeypatch)
    model = Attending()
    config = algo_config(beta=0.1, **options)
    batch = example(old_per_token_logps=SAMPLED, ref_per_token_logps=REFERENCE)
    found = loss_and_gradient(tunix.loss_fn(), model, batch, config)
    agrees(found, expected(model, config, old=None, sampled=SAMPLED))
    for other in (expected(model, config, old=None), expected(model, config, old=SAMPLED)):
        assert abs(found[0] - other[0]) > 1e-3
    assert ("sampler_rs/rejected_fraction" in found[1]) == ("sampler_rs" in options)
    assert ("sampler_is/frac_clipped_at_threshold" in found[1]) == ("sampler_is" in options)
    assert "sampler_is/weight_mean" not in found[1]  # the loss does not know it


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_log_prob_that_the_sampler_lacks(monkeypatch, options, bad):
    """Before: the loss was NaN.

    Tunix's weight is 0 there, with the same penalty and the same denominators.
    """
    install(monkeypatch)
    model = Attending()
    config = algo_config(beta=0.1, **options)
    sampled = SAMPLED.copy()
    sampled[0, 1] = bad
    batch = example(old_per_token_logps=sampled, ref_per_token_logps=REFERENCE)
    found = loss_and_gradient(tunix.loss_fn(), model, batch, config)
    agrees(found, expected(model, config, old=None, sampled=sampled))
    assert found[1]["unusable_tokens"] == 1


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_that_the_learner_has_applied(monkeypatch, options):
    """Its weights multiply the policy loss, at the trainer's old log-probs: the loss of the
    options in the loss.
    """
    install(monkeypatch)
    model = Attending()
    config = algo_config(beta=0.1, **options)
    x = log_probs(model, TOKEN_MASK)
    weights = corrected(x, SAMPLED, Correction.of(config))
    batch = example(
        old_per_token_logps=x, ref_per_token_logps=REFERENCE, sampler_is_weights=weights
    )
    batch.sampler_agreement_applied = True
    found = loss_and_gradient(tunix.loss_fn(), model, batch, config)
    agrees(found, expected(model, config, old=x, weights=weights))
    agrees(found, expected(model, config, old=None, sampled=SAMPLED))
    where = LOSS_MASK > 0
    np.testing.assert_allclose(found[1]["sampler_is/weight_mean"], weights[where].mean(), rtol=1e-6)
    np.testing.assert_allclose(found[1]["sampler_is/weight_min"], weights[where].min(), rtol=1e-6)


def test_weights_of_0_1_7_whose_batch_has_no_flag(monkeypatch):
    install(monkeypatch, new=False)
    model = Attending()
    config = algo_config(sampler_is="token")
    weights = np.where(LOSS_MASK > 0, 0.25, 0).astype(np.float32)
    batch = example(new=False, old_per_token_logps=SAMPLED, sampler_is_weights=weights)
    found = loss_and_gradient(tunix.loss_fn(), model, batch, config)
    ids = np.concatenate([PROMPTS, COMPLETIONS], axis=1)
    agrees(found, expected(model, config, old=SAMPLED, weights=weights, token_mask=ids != PAD))


def test_a_ratio_of_1(monkeypatch):
    install(monkeypatch)
    model = Attending()
    config = algo_config(force_on_policy_ratio=True)
    for old in (SAMPLED, None):
        found = loss_and_gradient(tunix.loss_fn(), model, example(old_per_token_logps=old), config)
        agrees(found, expected(model, config, old=None))


def test_a_threshold_that_the_learner_has_applied(monkeypatch):
    """It hands over the smaller mask, so nothing is left to do."""
    install(monkeypatch)
    model = Attending()
    config = algo_config(seq_logprob_error_threshold=2.0)
    batch = example(old_per_token_logps=SAMPLED, sampler_agreement_applied=True)
    agrees(
        loss_and_gradient(tunix.loss_fn(), model, batch, config),
        expected(model, config, old=SAMPLED),
    )


def test_old_log_probs_of_the_sampler_are_a_ratio_to_the_rollout(monkeypatch):
    """The agentic learner hands them over as old ones; with a correction applied, these are the
    trainer's own.
    """
    install(monkeypatch)
    model = Attending()
    config = algo_config()
    loss = tunix.loss_fn(
        PolicyLossConfig(
            ratio_to="rollout", kl=KL(0.0, "k1"), aggregation="sequence_mean_token_mean"
        )
    )
    batch = example(old_per_token_logps=SAMPLED, ref_per_token_logps=REFERENCE)
    agrees(loss_and_gradient(loss, model, batch, config), expected(model, config, old=SAMPLED))
    for other in (algo_config(use_rollout_logps=False), algo_config(sampler_is="token")):
        batch.sampler_agreement_applied = True
        with pytest.raises(ValueError, match=r"rollout_log_probs: got None"):
            loss_and_gradient(loss, model, batch, other)


CORRECTION = OffPolicyConfig("token", compares="current/rollout")


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"sampler_is": "token"}, {"off_policy": CORRECTION}),
        (
            {"sampler_rs": "token", "sampler_rs_min": 0.5, "sampler_rs_max": 4.0},
            {
                "off_policy": OffPolicyConfig(
                    rejections=(Rejection("token_k1", 0.25, 2.0, "current/rollout"),)
                )
            },
        ),
        ({"force_on_policy_ratio": True}, {}),
    ],
)
def test_a_config_of_ours_beside_options_of_theirs(monkeypatch, options, fields):
    """It is taken if it does what they say, and refused by name if it does not."""
    install(monkeypatch)
    model = Attending()
    config = algo_config(**options)
    batch = example(old_per_token_logps=SAMPLED)
    mine = PolicyLossConfig(ratio_to="current", aggregation="sequence_mean_token_mean", **fields)
    rule = Unusable.of("tunix") if fields else "nan"
    assert tunix.config_of(config) == dataclasses.replace(mine, unusable=rule)
    found = loss_and_gradient(tunix.loss_fn(mine), model, batch, config)
    agrees(found, expected(model, config, old=None, sampled=SAMPLED))
    name = next(iter(options))
    with pytest.raises(
        ValueError, match=f"^{name}: got .* beside a config that does not have it, expected None"
    ):
        loss_and_gradient(tunix.loss_fn(PolicyLossConfig()), model, batch, config)


WEIGHTS = np.ones(LOSS_MASK.shape, np.float32)


@pytest.mark.parametrize(
    ("config", "options", "fields", "message"),
    [
        (
            None,
            {"seq_logprob_error_threshold": 2.0},
            {},
            "seq_logprob_error_threshold: got 2.0 in SimpleNamespace",
        ),
        (
            None,  # the weights that the learner made hold no threshold
            {"seq_logprob_error_threshold": 2.0},
            {"sampler_is_weights": WEIGHTS},
            "seq_logprob_error_threshold: got 2.0 in SimpleNamespace, expected None where the loss",
        ),
        (
            None,
            {"sampler_is": "token"},
            {"old_per_token_logps": None},
            "sampler_is: got 'token' in .* without log-pro",
        ),
        (
            None,
            {"sampler_is": "token", "use_rollout_logps": False},
            {},
            "sampler_is: got 'token' in .* without log-p",
        ),
        (
            None,
            {"sampler_is": "sequence"},
            {},
            "sampler_is: got 'sequence', expected 'token' or None",
        ),
        (
            None,
            {"sampler_is": "token", "sampler_is_threshold": 0},
            {},
            "sampler_is_threshold: got 0, expected a numb",
        ),
        (
            None,
            {"sampler_rs": "run"},
            {},
            "sampler_rs: got 'run', expected None or one of token, geometric",
        ),
        (
            None,
            {"sampler_rs": "token"},
            {},
            "sampler_rs_min, sampler_rs_max: got None, None, expected two numbers",
        ),
        (
            None,
            {"sampler_rs": "token", "sampler_rs_min": 2.0, "sampler_rs_max": 1.0},
            {},
            (
                "sampler_rs_min, sampler_rs_max: got 2.0, 1.0, expected two numbers with 0 <= min"
                " < max"
            ),
        ),
        (
            PolicyLossConfig(SAPO()),
            {},
            {"sampler_is_weights": WEIGHTS},
            "sampler_is_weights: got .* beside SAPO, exp",
        ),
        (
            PolicyLossConfig(ratio_to="current", off_policy=CORRECTION),
            {},
            {"sampler_is_weights": WEIGHTS},
            "sampler_is_weights: got weights .* beside OffPolicyConfig",
        ),
        (
            None,
            {},
            {"segment_ids": LOSS_MASK, "segment_positions": LOSS_MASK},
            (
                "completion_attention_mask: got a mask beside segment_ids, expected None in a"
                " packed batch"
            ),
        ),
    ],
)
def test_what_is_refused_by_name(monkeypatch, config, options, fields, message):
    install(monkeypatch)
    batch = example(**{"old_per_token_logps": SAMPLED, **fields})
    with pytest.raises(ValueError, match=f"^{message}"):
        loss_and_gradient(tunix.loss_fn(config), Attending(), batch, algo_config(**options))


def test_a_flag_among_the_arrays(monkeypatch):
    install(monkeypatch)
    model = Attending()
    config = algo_config()

    def of(flag):
        return tunix.loss_fn()(
            model, example(sampler_agreement_applied=flag), config, PAD, 1
        ).primary_loss

    with pytest.raises(
        TypeError, match=r"^sampler_agreement_applied: got a traced value, expected True or False"
    ):
        jax.jit(lambda flag: of(flag).unreduced_sum)(jnp.array(True))


def test_a_pass_for_log_probs_reads_the_mask_of_tokens():
    model = Attending()
    found = tunix.log_probs(model, PROMPTS, COMPLETIONS, pad_id=PAD, token_mask=TOKEN_MASK)
    where = COMPLETION_TOKENS
    np.testing.assert_allclose(
        found[where], log_probs(model, TOKEN_MASK)[where], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(found[~where], 0)
    ids = np.concatenate([PROMPTS, COMPLETIONS], axis=1)
    plain = tunix.log_probs(model, PROMPTS, COMPLETIONS, pad_id=PAD)
    of_ids = where & (COMPLETIONS != PAD)
    np.testing.assert_allclose(
        plain[of_ids], log_probs(model, ids != PAD)[of_ids], rtol=1e-5, atol=1e-6
    )
    assert np.abs(found - plain)[of_ids].max() > 1e-2
    with pytest.raises(
        ValueError, match=r"^token_mask: got \(2, 5\), expected \(2, 9\), prompts and completions"
    ):
        tunix.log_probs(model, PROMPTS, COMPLETIONS, pad_id=PAD, token_mask=COMPLETION_TOKENS)
    packed = {
        "segment_ids": LOSS_MASK,
        "segment_positions": LOSS_MASK,
        "token_mask": COMPLETION_TOKENS,
    }
    with pytest.raises(
        ValueError,
        match=r"^token_mask: got a mask beside segment_ids, expected None for packed rows",
    ):
        tunix.log_probs(model, PROMPTS[:, :0], COMPLETIONS, pad_id=PAD, **packed)


@pytest.mark.parametrize("new", [True, False], ids=["main", "0.1.7"])
def test_every_metric_that_the_agentic_learner_logs(monkeypatch, new):
    """Before: it stopped at its first step, since it looks each of them up."""
    install(monkeypatch, new=new)
    batch = example(new=new, old_per_token_logps=SAMPLED)
    _, metrics, _ = loss_and_gradient(tunix.loss_fn(), Attending(), batch, algo_config())
    assert {*AGENTIC_METRICS} <= {*metrics}
    # two tokens and three, each with its sequence's advantage
    np.testing.assert_allclose(metrics["advantage/abs_mean"], (3 * 1.0 + 3 * 0.5) / 6)
    assert (metrics["advantage/max"], metrics["advantage/min"]) == (1.0, -0.5)
    assert metrics["advantage/nonzero_frac"] == 1
    assert metrics["sampler_is/weight_mean"] == metrics["sampler_is/weight_min"] == 1
    assert metrics["is_ratio/min"] < metrics["is_ratio/mean"] < metrics["is_ratio/max"]


BOTH = PolicyLossConfig(off_policy=OffPolicyConfig("token"))


@pytest.mark.parametrize(
    ("config", "new", "agentic", "message"),
    [
        (
            PolicyLossConfig(ratio_to="rollout"),
            False,
            False,
            "config: got a config that reads log-probs of",
        ),
        (
            PolicyLossConfig(ratio_to="current", off_policy=CORRECTION),
            False,
            False,
            "config: got a config that reads",
        ),
        (
            BOTH,
            True,
            True,
            "config: got a config that reads log-probs of the sampler .* and of the old policy",
        ),
        (
            PolicyLossConfig(KLCov()),
            True,
            True,
            "config.loss: got KLCov, which reads the covariance_mask of a step",
        ),
    ],
)
def test_a_config_that_the_learner_cannot_serve_is_refused_at_once(
    monkeypatch, config, new, agentic, message
):
    """Before: at the first step, after minutes of set-up."""
    registered = install(monkeypatch, new=new)
    with pytest.raises(ValueError, match=f"^{message}"):
        tunix.register(config, agentic=agentic)
    assert registered == {}
    with pytest.raises(ValueError, match=r"^agentic: got 'yes', expected True or False"):
        tunix.register(config, agentic="yes")


@pytest.mark.parametrize(
    ("config", "new", "agentic"),
    [
        (None, False, False),
        (PolicyLossConfig(), False, False),
        (PolicyLossConfig(CISPO(), ratio_to="current"), False, False),
        (PolicyLossConfig(ratio_to="rollout"), False, True),
        (PolicyLossConfig(ratio_to="rollout"), True, False),
    ],
)
def test_a_config_that_the_learner_serves(monkeypatch, config, new, agentic):
    registered = install(monkeypatch, new=new)
    assert tunix.register(config, agentic=agentic, name="mine") == "mine"
    assert registered["mine"].config == config


def test_the_stand_ins_leave_nothing_behind():
    assert not isinstance(sys.modules.get("tunix.rl.common"), SimpleNamespace)
    assert "tunix.rl.common" not in sys.modules or hasattr(
        sys.modules["tunix.rl.common"], "process_ids"
    )

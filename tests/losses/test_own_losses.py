"""Losses of one's own: what is wrong with one is said where it is traced, and
`assert_token_loss` finds the rest.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from policy_steps import AGGREGATIONS, config_of, loss_named

from jaxppo import (
    KL,
    PPO,
    SFT,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenLoss,
    TokenStats,
    Value,
)
from jaxppo.base.metrics import Metric
from jaxppo.batch.extras import Extra
from jaxppo.contrib.a2po import A2PO
from jaxppo.contrib.features import Features, States
from jaxppo.contrib.real import REAL
from jaxppo.contrib.score_centering import ScoreCentering
from jaxppo.losses import (
    Part,
    ReferenceKL,
    TopKDistillation,
    explain_tokens,
    loss_from_hidden,
    loss_from_stats,
    preference,
)
from jaxppo.losses.testing import assert_token_loss
from jaxppo.losses.token_loss import Asks
from jaxppo.policy_losses import CISPO, GMPO, BySign, PolicyLoss

COUNT = 16


def samples():
    """Pairs of samples of unequal length, with holes in their masks, and two sequences a row."""
    draws = np.random.default_rng(0)
    found = []
    for i in range(COUNT):
        n = 2 + i % 3
        ids = np.stack([draws.permutation(12)[:3] for _ in range(n)])
        log_probs = np.log(draws.dirichlet(np.ones(4), n)[:, :3])
        extras = {
            "teacher_ids": Extra(ids, fill=-1),
            "teacher_log_probs": log_probs,
            "bonus": draws.normal(size=n),
        }
        extras |= {"sampler_ids": Extra(ids, fill=-1), "sampler_log_probs": log_probs}
        extras["teacher_target_log_probs"] = [-1.5] * n
        near = [-2 - np.abs(draws.normal(size=n)) for _ in range(3)]
        values = {
            "advantages": draws.normal(size=n),
            "returns": draws.normal(size=n),
            "values": draws.normal(size=n),
        }
        values |= dict(
            zip(("old_log_probs", "ref_log_probs", "rollout_log_probs"), near, strict=True)
        )
        mask = [0.0, *[1.0] * n]
        mask[2] = float(i % 2)
        of = {"group_id": i // 2, "reward": float(i % 2), "sample_id": i, "rollout_id": i // 2}
        found.append(
            Sample(draws.integers(0, 12, n + 1), 1, loss_mask=mask, extras=extras, **of, **values)
        )
    return found


BATCH = RolloutBatch.from_samples(samples(), row_length=16, rows=8, num_segments=4)
STATS = TokenStats(jnp.asarray(BATCH.old_log_probs))
HIDDEN = jnp.ones((*BATCH.tokens.shape, 4)), jnp.zeros((4, 16))
MESHES = ["dp=2,cp=2,tp=2", "cp=8"]


def made(name="Own", **methods):
    """A loss of one's own whose class has these methods and attributes."""
    plain = {"terms": lambda self, stats, batch, constants, segments: {"nll": -stats.log_probs}}
    return dataclasses.dataclass(frozen=True)(type(name, (TokenLoss,), plain | methods))()


def policy(call, local=True):
    methods = {"__call__": call, "token_local": local}
    return dataclasses.dataclass(frozen=True)(type("Mine", (PolicyLoss,), methods))()


def of_terms(fn):
    return made(terms=lambda self, stats, batch, constants, segments: fn(stats.log_probs, segments))


def with_metrics(fn):
    return made(
        metrics=lambda self, stats, weighed, constants: fn(stats.log_probs, weighed.batch.loss_mask)
    )


TRACED = {
    "an aggregation": (made(aggregation="mean"), r"Own.aggregation: got 'mean', expected one of"),
    "a norm": (
        made(aggregation_norm=3.0),
        r"Own.aggregation_norm: got 3.0 with aggregation='token_mean', expected None",
    ),
    "no norm": (
        made(aggregation="sequence_mean_token_sum_norm"),
        r"Own.aggregation_norm: got None, expected a finite",
    ),
    "off_policy": (
        made(off_policy=3),
        r"Own.off_policy: got int, expected OffPolicyConfig or None",
    ),
    "asks": (made(asks=3), r"Own.asks: got int, expected losses.token_loss.Asks"),
    "token_local": (made(token_local=1), r"Own.token_local: got int, expected True or False"),
    "a scalar": (
        of_terms(lambda x, _: {"a": -x.mean()}),
        r"Own.terms\['a'\]: got shape \(\), expected \(",
    ),
    "a number": (
        of_terms(lambda x, _: {"a": 1.0}),
        r"Own.terms\['a'\]: got float, expected an array \[R, T\]",
    ),
    "integers": (
        of_terms(lambda x, _: {"a": jnp.ones(x.shape, int)}),
        r"Own.terms\['a'\]: got dtype int32, expected flo",
    ),
    "a list": (
        of_terms(lambda x, _: [-x]),
        r"Own.terms: got list, expected the terms of each token's loss by name",
    ),
    "an array": (
        of_terms(lambda x, _: -x),
        r"Own.terms: got an array, expected the terms of each token's loss by",
    ),
    "no term": (of_terms(lambda x, _: {}), r"Own.terms: got no term, expected at least one"),
    "a sum over a sequence": (
        of_terms(lambda x, segments: {"a": segments.spread(segments.sum(x))}),
        (
            r"Own.token_local: got True with segments.sum in its loss of a token, expected"
            r" token_local=False"
        ),
    ),
    "constants of log-probs": (
        made(constants=lambda self, stats, weighed: {"x": stats.log_probs}),
        r"Own.constants: got a need for stats, expected token_local=False",
    ),
    "constants of samples": (
        made(constants=lambda self, stats, weighed: {"x": weighed.batch.sample_ids}),
        r"Own.constants\['x'\]: got shape \(8, 4\), expected \(8, 16\) and more",
    ),
    "metrics": (
        with_metrics(lambda x, mask: {"a": x}),
        (
            r"Own.metrics\['a'\]: got another term, expected \(values, weights, how\) with arrays"
            r" \[R, T\]"
        ),
    ),
    "a Metric": (
        with_metrics(lambda x, mask: {"a": Metric(x.sum(), mask.sum())}),
        (
            r"Own.metrics\['a'\]: got Metric, expected \(values, weights, how\) .*, which is"
            r" reduced for you"
        ),
    ),
    "a metric of every loss": (
        with_metrics(lambda x, mask: {"broken_rules": (x, mask, "mean"), "loss": (x, mask, "sum")}),
        (
            r"Own.metrics: got \['broken_rules', 'loss'\], expected other names: every loss reports"
            r" these"
        ),
    ),
    "a metric's way": (
        with_metrics(lambda x, mask: {"a": (x, mask, "avg")}),
        r"Own.metrics\['a'\]\[2\]: got 'avg', expect",
    ),
    "a metric's values": (
        with_metrics(lambda x, mask: {"a": (1.0, mask, "sum")}),
        r"Own.metrics\['a'\]\[0\]: got float",
    ),
    "reads": (
        made(reads=lambda self, stats, batch, segments: [1]),
        r"Own.reads: got list, expected arrays by the names",
    ),
    "reads of another shape": (
        made(reads=lambda self, stats, batch, segments: {"x": jnp.ones(3)}),
        r"Own.reads\['x'\]: got shape \(3,\), expected \(8, 16\) and more",
    ),
    "reads of an absent array": (
        made(reads=lambda self, stats, batch, segments: {"extras": None}),
        (
            r"Own.reads\['extras'\]: got None, expected an array: Own reads it, and the batch or"
            r" the statistics lack it"
        ),
    ),
    "left_out": (
        made(left_out=lambda self, stats, batch: jnp.array(True)),
        r"Own.left_out: got shape \(\), expected \(8, 16\), one for each token",
    ),
    "a policy's scalar": (
        policy(lambda self, x, old, advantages, **_: (x.mean(), {})),
        r"Mine.__call__, losses: got shape \(\), expected \(",
    ),
    "a policy's array": (
        policy(lambda self, x, old, advantages, **_: -x),
        r"Mine.__call__: got an array, expected \(losses \[R, T\], indicators \[R, T\] by name\)",
    ),
    "a policy's indicator": (
        policy(lambda self, x, old, advantages, **_: (-x, {"share": 1.0})),
        r"Mine.__call__, share: got float, expected an array \[R, T\]",
    ),
    "a policy's scalar, by sign": (
        BySign(positive=policy(lambda self, x, old, advantages, **_: (x.mean(), {}))),
        r"Mine.__call__, losses: got shape \(\), expected \(",
    ),
    "a policy's sum over a sequence": (
        policy(
            lambda self, x, old, advantages, *, segments, **_: (
                segments.spread(segments.sum(x)),
                {},
            )
        ),
        r"Mine.token_local: got True with segments.sum in its loss of a token",
    ),
}


@pytest.mark.parametrize("what", TRACED)
def test_said_where_it_is_traced(what):
    loss, message = TRACED[what]
    for call in (
        lambda: loss_from_stats(STATS, BATCH, loss),
        lambda: loss_from_hidden(*HIDDEN, BATCH, loss),
    ):
        with pytest.raises((TypeError, ValueError), match="^" + message):
            call()


def test_an_array_that_the_batch_lacks():
    """It was Python's "unsupported operand type(s) for *: 'NoneType'", though `reads` named the
    array.
    """

    def terms(self, stats, batch, constants, segments):
        return {"a": batch.old_log_probs * stats.log_probs}

    def reads(self, stats, batch, segments):
        return {
            "old_log_probs": batch.old_log_probs,
            "own": None if stats is None else stats.log_probs,
        }

    loss = made(terms=terms, reads=reads)
    lacking = dataclasses.replace(BATCH, old_log_probs=None)
    for call in (
        lambda x: loss_from_stats(STATS, x, loss),
        lambda x: loss_from_hidden(*HIDDEN, x, loss),
    ):
        assert np.isfinite(float(call(BATCH)[0]))
        with pytest.raises(
            ValueError,
            match=r"^Own.reads\['old_log_probs'\]: got None, expected an array: Own reads",
        ):
            call(lacking)


def test_indicators_have_names_of_their_own():
    """Those with the name of a metric of every policy loss were dropped: ratio_mean was 1 for 7."""
    options = {
        "kl": KL(0.1),
        "off_policy": OffPolicyConfig(weights="token", high=2.0),
        "clip_by_sign": True,
    }
    batch = dataclasses.replace(BATCH, rollout_log_probs=BATCH.old_log_probs)
    _, plain = loss_from_stats(STATS, batch, PolicyLossConfig(PPO(), **options))
    names = {*plain, "entropy", "unusable_tokens"} - {"clip_fraction", "clip_fraction_lower"}
    assert {
        "loss",
        "broken_rules",
        "ratio_mean",
        "ppo_kl",
        "kl",
        "pg_loss",
        "rollout_capped",
    } < names
    for name in names:
        own = policy(
            lambda self, x, old, advantages, name=name, **_: (
                -advantages * x,
                {name: 7 + 0 * x, "own": x},
            )
        )
        with pytest.raises(
            ValueError, match=rf"^Mine.__call__: got indicators \['{name}'\], expected other names"
        ):
            loss_from_stats(STATS, batch, PolicyLossConfig(own, **options))
    own = policy(
        lambda self, x, old, advantages, **_: (-advantages * x, {"clip_fraction": 7 + 0 * x})
    )
    _, found = loss_from_stats(STATS, batch, own)
    assert float(found["clip_fraction"].value) == 7


def test_losses_of_pairs_and_samples():
    """One number for all pairs was spread over them."""

    @dataclasses.dataclass(frozen=True)
    class OfAll(preference.PairLoss):
        beta: float = 0.1

        def __call__(self, chosen, rejected):
            return jnp.mean(self.reward(rejected) - self.reward(chosen))

    @dataclasses.dataclass(frozen=True)
    class OfSamples(preference.PreferenceLoss):
        paired: ClassVar[bool] = False
        beta: float = 0.1

        def of_samples(self, x, batch, pairs):
            return self.reward(x).mean()

    for loss, what in (
        (OfAll(), r"OfAll.__call__: got shape \(\), expected \("),
        (OfSamples(), "OfSamples.of_samples: got"),
    ):
        with pytest.raises(ValueError, match="^" + what):
            loss_from_stats(STATS, BATCH, loss)


def test_reasons_are_checked_where_they_are_read():
    loss = made(reasons=lambda self, stats, weighed, constants: {"why": True})
    with pytest.raises(TypeError, match=r"^Own.reasons\['why'\]: got bool, expected an array"):
        explain_tokens(STATS, BATCH, loss)


def test_a_part_is_checked_where_it_is_made():
    with pytest.raises(ValueError, match=r"^Own.aggregation: got 'mean'"):
        Part(made(aggregation="mean"), coef=0.5)


# a value without one has no gradient
ERRORS = 0.5 * np.sin(np.arange(BATCH.returns.size)).reshape(BATCH.returns.shape)
VALUES = jnp.asarray(BATCH.returns + ERRORS, jnp.float32)
STATES = States(HIDDEN[0] * 3, 0.1 * HIDDEN[0])
OURS = {
    "sft": (SFT(label_smoothing=0.1, z_loss=0.01), None),
    "dft": (SFT(dft=True, aggregation="rollout_mean"), None),
    "reference": (ReferenceKL("k2"), None),
    "distillation": (TopKDistillation("jensen_shannon"), None),
    "sampled tail": (TopKDistillation("reverse_kl", tail="sampled"), None),
    "a2po": (A2PO(), None),
    "real": (REAL(), None),
    "centring": (ScoreCentering(PolicyLossConfig(CISPO(), ratio_to="rollout")), None),
    "value": (Value(clip=0.2, huber_delta=1.0), VALUES),
    "features": (Features(), STATES),
    "dpo": (preference.DPO(nll_coef=0.1), None),
    "kto": (preference.KTO(0.1), None),
    "bradley_terry": (preference.BradleyTerry(centring=0.1), VALUES),
    "ppo": (PPO(), None),
    "gmpo, every penalty": (config_of(GMPO(), kl=KL(0.1, importance="sequence")), None),
    **{f"cispo, {name}": (config_of(loss_named("cispo"), name), None) for name in AGGREGATIONS},
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", OURS)
def test_the_losses_of_this_package(name):
    loss, stats = OURS[name]
    assert np.isfinite(assert_token_loss(loss, BATCH, stats=stats, meshes=MESHES[:1]))


def test_a_loss_that_reads_an_extra():
    loss = made(
        terms=lambda self, stats, batch, constants, segments: {
            "a": -batch.extras["bonus"] * stats.log_probs
        }
    )
    assert_token_loss(loss, BATCH, meshes=MESHES)


class _Weighted(TokenLoss[TokenStats]):
    """The negative log-likelihood times a constant weight of the sequence."""

    weight: ClassVar

    def terms(self, stats, batch, constants, segments):
        return {"a": -stats.log_probs * lax.stop_gradient(self.weight(stats.log_probs, segments))}


def weighted(weight, **attributes):
    return dataclasses.dataclass(frozen=True)(
        type("Own", (_Weighted,), {"weight": staticmethod(weight), **attributes})
    )()


def test_a_wrong_flag():
    """Sums over a row are seen by no trace: 6.70 from statistics, 10.16 from hidden states in
    one such case.
    """
    loss = weighted(lambda x, _: x.sum(axis=1, keepdims=True))
    with pytest.raises(
        AssertionError,
        match=r"Own.token_local: got True, but the loss of the token at .* expected token_l",
    ):
        assert_token_loss(loss, BATCH, meshes=[])
    right = weighted(lambda x, segments: segments.spread(segments.sum(x)), token_local=False)
    assert_token_loss(right, BATCH, meshes=MESHES)


def test_what_differs_on_a_mesh():
    loss = weighted(lambda x, _: x.sum(axis=1, keepdims=True), token_local=False)
    with pytest.raises(AssertionError, match="mesh cp=8"):
        assert_token_loss(loss, BATCH, meshes=["cp=8"])


def test_what_differs_from_hidden_states():
    """A number of the shape of the rows: a block of one pass has other rows."""
    loss = made(
        terms=lambda self, stats, batch, constants, segments: {
            "a": -stats.log_probs / stats.log_probs.shape[0]
        }
    )
    with pytest.raises(AssertionError, match="Own from hidden states, against statistics,"):
        assert_token_loss(loss, BATCH, meshes=[])


def test_what_is_read_where_the_mask_is_0():
    """The batch of `reads` is as the caller gave it: its rules must look where the mask is 1, as
    those by name do.
    """

    class Leaky(_Weighted):
        weight = staticmethod(lambda x, _: 1.0 + 0 * x)

        def left_out(self, stats, batch):
            return jnp.isnan(batch.ref_log_probs).any() & (batch.loss_mask > 0)

    with pytest.raises(AssertionError, match="with NaN where the loss mask is 0"):
        assert_token_loss(dataclasses.dataclass(frozen=True)(Leaky)(), BATCH, meshes=[])


def test_what_shows_nothing_is_refused():
    nothing = dataclasses.replace(BATCH, advantages=np.zeros_like(BATCH.advantages))
    with pytest.raises(
        AssertionError, match=r"PPO: got gradients of at most 0\.0, expected finite ones"
    ):
        assert_token_loss(PPO(), nothing)
    unsound = dataclasses.replace(BATCH, advantages=np.full_like(BATCH.advantages, np.nan))
    with pytest.raises(
        AssertionError,
        match=r"PPO: got the loss nan for this batch, expected a finite one\. advantages: ex",
    ):
        assert_token_loss(PPO(), unsound)
    with pytest.raises(ValueError, match="stats: got None, expected the statistics that Value"):
        assert_token_loss(Value(), BATCH)
    with pytest.raises(ValueError, match="stats: got some, expected None for a loss of log-probs"):
        assert_token_loss(SFT(), BATCH, stats=STATS)
    with pytest.raises(ValueError, match="meshes: got 8 devices for 3 rows of 5 positions"):
        assert_token_loss(
            SFT(), RolloutBatch.from_samples([Sample([1, 2, 3], 1)] * 3, row_length=5, rows=3)
        )


def test_asks_of_the_head():
    """What the loss asks for reaches it: entropies with a gradient, a statistic, ids."""

    class Wide(TokenLoss[TokenStats]):
        asks = Asks("bonus", logit_stats=("log_z",), ids="teacher_ids", extras=("teacher_ids",))

        def terms(self, stats, batch, constants, segments):
            found = jnp.where(batch.extras["teacher_ids"] == -1, 0, stats.id_log_probs).sum(axis=-1)
            return {"a": stats.entropy, "b": 0.1 * stats.log_z**2, "c": -found}

    assert_token_loss(dataclasses.dataclass(frozen=True)(Wide)(), BATCH, meshes=MESHES[:1])


def test_gradients_are_compared():
    """The same value in both ways, and a gradient of one alone."""

    @jax.custom_jvp
    def odd(x):
        return x

    @odd.defjvp
    def slope(primals, tangents):
        (x,), (dx,) = primals, tangents
        return x, dx * x.shape[0]

    loss = made(terms=lambda self, stats, batch, constants, segments: {"a": -odd(stats.log_probs)})
    with pytest.raises(AssertionError, match="Own from hidden states"):
        assert_token_loss(loss, BATCH, meshes=[])

"""Options of losses, configs and presets as odd values: the error names the option, or a jax
scalar is its value.
"""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    KL,
    PPO,
    SFT,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    explain_broken_rules,
    loss_from_stats,
    policy_losses,
    presets,
)
from jaxppo.contrib.a2po import A2PO
from jaxppo.contrib.draft import Draft
from jaxppo.contrib.features import Features
from jaxppo.contrib.real import REAL
from jaxppo.contrib.score_centering import ScoreCentering
from jaxppo.losses import Part, ReferenceKL, TopKDistillation, by_row, preference
from jaxppo.losses.mtp import MTP

LARGE = 10**400
ODD = [
    *(
        None,
        True,
        "x",
        b"x",
        object,
        1j,
        {},
        [0.1],
        (0.1,),
        -1,
        0,
        1,
        0.5,
        float("nan"),
        float("inf"),
        1e300,
        LARGE,
    ),
    *(
        np.array(0.5),
        np.array([0.5]),
        np.float16(np.inf),
        np.float32(0.5),
        np.int64(1),
        np.bool_(True),
    ),
    *(jnp.float32(0.5), jnp.int32(1), jnp.array([0.5]), jnp.bool_(True), jax.random.key(0)),
]
CLASSES = {
    **{
        of: {}
        for of in (
            *policy_losses.BY_NAME.values(),
            policy_losses.BySign,
            PolicyLossConfig,
            OffPolicyConfig,
        )
    },
    **{
        of: {}
        for of in (SFT, Value, ReferenceKL, TopKDistillation, Features, Draft, MTP, A2PO, REAL)
    },
    **{
        of: {}
        for of in (
            preference.DPO,
            preference.IPO,
            preference.SimPO,
            preference.ORPO,
            preference.AOT,
        )
    },
    preference.BradleyTerry: {},
    preference.KTO: {"reference_point": 0.0},
    ScoreCentering: {"config": PolicyLossConfig(policy_losses.CISPO(), ratio_to="rollout")},
    Part: {"loss": SFT()},
    KL: {"coef": 0.1},
    Rejection: {"statistic": "token_k1"},
}


def traced(call, value):
    """The call under jit, with an array as an argument."""
    jax.jit(lambda x: (call(x), jnp.ones(1))[1]).lower(value)


def check_named(call, value):
    """The call succeeds, or its error begins with what it is about."""
    calls = [call, lambda value: traced(call, value)] if isinstance(value, jax.Array) else [call]
    for each in calls:
        try:
            each(value)
        except (TypeError, ValueError) as error:
            if not re.match(r"[\w.\[\]', ]+: got ", str(error)):
                raise AssertionError(f"{value!r}: {error}") from error


@pytest.mark.parametrize("of", CLASSES, ids=lambda of: of.__name__)
def test_fields_of_losses_and_configs(of):
    for field in dataclasses.fields(of):
        for value in ODD:
            check_named(lambda x, name=field.name: of(**{**CLASSES[of], name: x}), value)


@pytest.mark.parametrize(
    "name",
    [name for name in presets.__all__ if inspect.signature(getattr(presets, name)).parameters],
)
def test_options_of_presets(name):
    preset = getattr(presets, name)
    cases = [{}]
    options = list(inspect.signature(preset).parameters)
    if name == "tinker":
        gspo = {"loss_fn": "gspo", "clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
        cases = [{"loss_fn": "ppo"}, {"loss_fn": "cispo"}, gspo, {"loss_fn": "dro"}]
        options = ["loss_fn", "clip_low_threshold", "clip_high_threshold", "beta"]
    for case in cases:
        for option in options:
            for value in ODD:
                check_named(
                    lambda x, given=case, option=option: preset(**{**given, option: x}), value
                )


def losses_of(x):
    return by_row(x, "client")


def loss_of(x):
    return by_row({"a": x}, "client")


def which_of(x):
    return by_row({"a": PPO()}, x)


def numbers_of(x):
    return by_row({"a": PPO()}, "client", x)


def numbers_of_a_loss(x):
    return by_row({"a": PPO()}, "client", {"a": x})


def extra_of_a_number(x):
    return by_row({"a": PPO()}, "client", {"a": {"clip_low": x}})


def name_of_a_number(x):
    return by_row({"a": PPO()}, "client", {"a": {x: "low"}})


OF_BY_ROW = (losses_of, loss_of, which_of, numbers_of, numbers_of_a_loss, extra_of_a_number)


@pytest.mark.parametrize("call", OF_BY_ROW)
def test_arguments_of_by_row(call):
    for value in ODD:
        check_named(call, value)


def test_names_of_numbers_of_by_row():
    for value in (None, 1, 0.5, b"x", (1,)):
        check_named(name_of_a_number, value)


NAMES = ("advantages", "old_log_probs", "rollout_log_probs")
VALUES = dict(zip(NAMES, ([1.0, -1.0, 0.5], [-1.0, -2.0, -1.5], [-1.5, -1.0, -2.5]), strict=True))
BATCH = RolloutBatch.from_samples([Sample([1, 2, 3, 4], 1, **VALUES)], row_length=4)
STATS = TokenStats(jnp.array([[-2.5, -2.2, -1.4, 0.0]]))
BOUNDS = {  # a config of a number, one that it takes, some that it refuses, and the rule
    "low": (
        lambda x: OffPolicyConfig("token", low=x, high=1.5),
        0.8,
        (-0.1, 1.5),
        "off_policy.low",
    ),
    "high": (
        lambda x: OffPolicyConfig("token", low=0.5, high=x),
        1.2,
        (0.5, -1.0),
        "off_policy.high",
    ),
    "veto": (lambda x: OffPolicyConfig("token", veto=x), 0.4, (0.0, 1.0), "off_policy.veto"),
    "opsm_delta": (lambda x: OffPolicyConfig(opsm_delta=x), 0.2, (-0.1,), "off_policy.opsm_delta"),
    "a rejection's low": (
        lambda x: OffPolicyConfig(rejections=(Rejection("token_k1", x, 9.0),)),
        0.5,
        (-0.5, 9.0),
        "off_policy.rejections.low",
    ),
    "a rejection's high": (
        lambda x: OffPolicyConfig(rejections=[Rejection("token_k2", high=x)]),
        0.05,
        (0.0,),
        "off_policy.rejections.high",
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_may_be_traced(name):
    of, good, bad, rule = BOUNDS[name]

    @jax.jit
    def run(x):
        config = PolicyLossConfig(off_policy=of(x))
        loss, metrics = loss_from_stats(STATS, BATCH, config)
        return loss, metrics["broken_rules"].value

    expected = loss_from_stats(STATS, BATCH, PolicyLossConfig(off_policy=of(good)))[0]
    np.testing.assert_allclose(run(good)[0], expected, rtol=1e-6)
    without = loss_from_stats(STATS, BATCH, PolicyLossConfig())[0]
    assert abs(expected - without) > 1e-3  # the number takes effect
    for number in (*bad, np.nan):
        loss, broken = run(number)
        assert np.isnan(loss), number
        assert explain_broken_rules(broken)[0].startswith(f"{rule}: expected")
        with pytest.raises(ValueError, match="got"):
            of(number)


def test_bounds_of_a_mean_weight_are_known():
    with pytest.raises(
        ValueError,
        match=r"low, high: got arrays as \['high'\], expected Python numbers with batch_norm",
    ):
        OffPolicyConfig("token", high=jnp.float32(2.0), batch_normalize=True)


def test_the_smoothing_of_a_link_that_does_not_read_it():
    """A traced one was ignored."""
    assert np.isnan(
        jax.jit(lambda x: preference.DPO(link="hinge", label_smoothing=x).label_smoothing)(0.1)
    )
    assert (
        jax.jit(lambda x: preference.DPO(link="hinge", label_smoothing=x).label_smoothing)(0.0) == 0
    )
    assert np.isnan(
        jax.jit(lambda x: preference.DPO(link="robust", label_smoothing=x).label_smoothing)(0.5)
    )

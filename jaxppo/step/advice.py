"""What the metrics of a step say is wrong, and what to do: rules over numbers that losses report,
read on the host.

docs/metrics.md derives every threshold here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxppo.base.arrays import MAX_SAMPLED, check, check_count, check_type
from jaxppo.base.kl import MAX_LOG_RATIO
from jaxppo.base.metrics import Composite, Metric
from jaxppo.batch.broken_rules import explain_broken_rules

__all__ = ["Advice", "advise"]

ROUNDING = MAX_SAMPLED  # nats, how far bf16 logits may move a log-prob
ROUNDING_K3 = math.expm1(ROUNDING) - ROUNDING  # the k3 of a token that moved so far
# the smallest effective sample size of tokens that moved so far
ROUNDING_SAMPLE_SIZE = 1 / math.cosh(ROUNDING) ** 2
HALF = 0.5  # a step of which more than this teaches nothing
# of these, by chance the later half all lies below the earlier one once in 252 times
FEWEST_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Advice:
    """What a rule found in the metrics of a step. Its `str` is a line to log.

    Args:
      rule: the name of the rule.
      sentence: what is wrong, with the numbers that show it, and what to do.
      page: the section of the documentation that the rule comes from.

    Example:
      >>> found = advise({"ppo_kl": 0.0, "effective_sample_size": 0.3}, update=1)
      >>> [x.rule for x in found], found[0].page
      (['old_samples'], 'docs/training_step.md#several-updates-on-one-batch')
    """

    rule: str
    sentence: str
    page: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.sentence} See {self.page}"


Numbers = Float[np.ndarray, " updates"]
_NOTHING: Numbers = np.zeros(0)


@dataclasses.dataclass(frozen=True)
class Seen:
    """The metrics that rules read: of each step, the oldest first, the numbers of each of its
    updates by name.
    """

    steps: tuple[Mapping[str, Numbers], ...]
    update: int  # of the first number of each step, from 0

    def last(self, name: str) -> Numbers:
        """The numbers of the last step; empty where it does not report this metric."""
        return self.steps[-1].get(name, _NOTHING)

    def fresh(self, name: str) -> Numbers:
        """Those of the first update on its samples."""
        return self.last(name)[: max(1 - self.update, 0)]

    def later(self, name: str) -> Numbers:
        """Those of all other updates."""
        return self.last(name)[max(1 - self.update, 0) :]

    def by_step(self, name: str) -> Numbers:
        """The mean of each step; empty unless all steps report the metric."""
        if not all(step.get(name, _NOTHING).size for step in self.steps):
            return _NOTHING
        return np.array([step[name].mean() for step in self.steps])


def _largest(numbers: Numbers) -> float:
    """The largest number; -inf where there is none, NaN where one is NaN, so that no comparison
    holds.
    """
    return float(numbers.max(initial=-np.inf))


def _smallest(numbers: Numbers) -> float:
    return -_largest(-numbers)


def _shown(seen: Seen, *names: str) -> str:
    """These metrics of the last step, those that are there."""
    numbers = {name: seen.last(name) for name in names}
    return ", ".join(f"{name} {_largest(x):.2g}" for name, x in numbers.items() if x.size)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: the metrics that it reads, when it speaks and what it says, and the section that
    it comes from.
    """

    name: str
    reads: tuple[str, ...]
    # None where nothing is wrong, or the metrics are not there
    sentence: Callable[[Seen], str | None]
    page: str


def _nan_loss(seen: Seen) -> str | None:
    broken = [number for number in seen.last("broken_rules") if number != 0]
    if not broken:
        return None
    names = ", ".join(line.partition(":")[0] for line in explain_broken_rules(broken[0]))
    return (
        f"The loss is NaN because of what it reads ({names}): explain_broken_rules({broken[0]:g})"
        " says what is expected, and batch.validate(vocab_size) names the first wrong entry, or,"
        " where it finds none, parameters are not finite."
    )


def _unusable_tokens(seen: Seen) -> str | None:
    unusable = _largest(seen.last("unusable_tokens"))
    if unusable > 0:
        return (
            f"{unusable:g} loss tokens have a log-prob that is not finite and do not train as"
            " sampled: mend what the sampler reports, or, at -inf, make the trainer replay what"
            " the sampler cut off (top-p, top-k, masked columns)."
        )
    apart = seen.last("sampler_log_prob_abs_diff")
    if np.isfinite(seen.last("loss")).all() and not np.isfinite(apart).all():
        return (
            "The sampler's log-probs are not finite at some loss tokens, which only metrics have"
            " noticed: mend them before a ratio or a correction reads them."
        )
    return None


def _equal_rewards(seen: Seen) -> str | None:
    equal = _largest(seen.last("equal_rewards"))
    if not equal > HALF:
        return None
    return (
        f"{equal:.0%} of the groups have rewards that are all equal and teach nothing: leave them"
        " out with advantages.drop_equal_groups, and sample prompts that are neither always solved"
        " nor never."
    )


def _no_reward(seen: Seen) -> str | None:
    missing = _largest(seen.last("no_reward"))
    if not missing > HALF:
        return None
    return (
        f"{missing:.0%} of the samples have no reward and teach nothing: look for requests that the"
        " engine aborted, and for a reward function that fails."
    )


def _first_update(seen: Seen) -> str | None:
    # not of a policy loss: mismatch_metrics has an effective sample size too
    if not seen.last("ppo_kl").size:
        return None
    moved = _largest(np.abs(seen.fresh("ppo_kl")))
    alike = _smallest(seen.fresh("effective_sample_size"))
    if not (moved > ROUNDING or alike < ROUNDING_SAMPLE_SIZE):
        return None
    return (
        "On fresh samples the policy is not the one that it is compared with"
        f" ({_shown(seen, 'ppo_kl', 'effective_sample_size')}; expected 0 and 1): look for values"
        " one position off, for dropout, and for another temperature."
    )


def _old_samples(seen: Seen) -> str | None:
    if not seen.last("ppo_kl").size:
        return None
    worth = _smallest(seen.later("effective_sample_size"))
    if not worth < HALF:
        return None
    return (
        f"After updates on the same samples they are worth {worth:.0%} of as many fresh ones: take"
        " a smaller learning rate or fewer updates on a batch."
    )


def _clipped(seen: Seen) -> str | None:
    share = _largest(seen.last("clip_fraction"))
    if not share > HALF:
        return None
    return (
        f"{share:.0%} of the tokens are beyond the bounds of the clip: take a smaller learning rate"
        " or fewer updates on a batch, and see whether the bounds suit this loss."
    )


def _far_tokens(seen: Seen) -> str | None:
    ratios = np.concatenate([seen.last("ratio_min"), seen.last("ratio_max")])
    rounding = 1e-5  # of exp and its logarithm in f32
    with np.errstate(divide="ignore", invalid="ignore"):
        far = _largest(np.abs(np.log(ratios)))
    if not far >= MAX_LOG_RATIO - rounding:
        return None
    return (
        f"A token's log-prob is {MAX_LOG_RATIO:g} nats or more from the one that it is compared"
        " with, where its ratio is clamped: look for log-probs of other tokens, and for a learning"
        " rate that is far too large."
    )


def _sampler(seen: Seen) -> str | None:
    apart = _largest(
        np.concatenate([seen.last("sampler_log_prob_abs_diff"), seen.last("log_prob_abs_diff")])
    )
    k3 = _largest(np.concatenate([seen.last("sampler_k3"), seen.last("k3_kl")]))
    if apart == np.inf or not (apart > ROUNDING or k3 > ROUNDING_K3):
        return None
    return (
        "Sampler and trainer are further apart than rounding to bfloat16 explains"
        f" ({_shown(seen, 'sampler_log_prob_abs_diff', 'sampler_k3', 'log_prob_abs_diff', 'k3_kl')}):"
        " compare temperature, padded columns, adapters and versions of the weights in a mismatch"
        " report, or correct with OffPolicyConfig."
    )


def _blind_model(seen: Seen) -> str | None:
    first = _largest(seen.last("first_in_row_abs_diff"))
    behind = _largest(seen.last("behind_others_abs_diff"))
    if not (first <= ROUNDING < behind and first > -np.inf):
        return None
    return (
        f"The trainer agrees with the sampler on the first sample of each row ({first:.2g} nats a"
        f" token), and not on those behind it ({behind:.2g}): the model attends across samples, so"
        " give batch.paths or the segment ids to its attention, and call assert_packing_invariant."
    )


def _rejected(seen: Seen) -> str | None:
    share = _largest(np.concatenate([seen.last("rejected_fraction"), seen.last("veto_fraction")]))
    if not share > HALF:
        return None
    return (
        f"The off-policy correction leaves {share:.0%} of the tokens out: bring the sampler nearer"
        " to the trainer, or see whether the bounds suit this statistic."
    )


def trend(numbers: Numbers) -> float:
    """How far the later half of an even number of values lies above the earlier half, in deviations
    of chance.

    The number of pairs (earlier, later) in which the later one is larger is n^2 / 2 on average over
    all orders, with a variance of n^2 (2n + 1) / 12. Mann and Whitney 1947,
    https://doi.org/10.1214/aoms/1177730491
    """
    half = len(numbers) // 2
    earlier = numbers[:half]
    later = numbers[half:]
    larger = (later[:, None] > earlier).sum() + (later[:, None] == earlier).sum() / 2
    return float((larger - half**2 / 2) / math.sqrt(half**2 * (2 * half + 1) / 12))


# of the fewest steps, if all of the later half lie above the earlier one
RARE = trend(np.arange(float(FEWEST_STEPS)))


def _entropy(seen: Seen) -> str | None:
    entropy = seen.by_step("entropy")
    rewards = seen.by_step("reward")
    if not rewards.size:
        rewards = seen.by_step("pass_rate")
    half = len(entropy) // 2
    if 2 * half < FEWEST_STEPS or not rewards.size:
        return None
    entropy = entropy[-2 * half :]
    rewards = rewards[-2 * half :]
    before = entropy[:half].mean()
    after = entropy[half:].mean()
    reward = rewards[:half].mean()
    reward_after = rewards[half:].mean()
    if not (trend(-entropy) >= RARE and reward_after <= reward):
        return None
    return (
        f"Over {2 * half} steps the entropy fell from {before:.2g} to {after:.2g} nats and the"
        f" reward did not rise ({reward:.2g} to {reward_after:.2g}): raise clip_high or the entropy"
        " coefficient, and see whether the rewards depend on the responses."
    )


def _critic(seen: Seen) -> str | None:
    explained = _smallest(seen.last("explained_variance"))
    if not explained < 0:
        return None
    return (
        f"The critic predicts returns worse than a constant (explained_variance {explained:.2g}):"
        " train it alone for some steps before advantages rely on it, or, where nearly all returns"
        " are equal, look at value_error instead."
    )


_METRICS = "docs/metrics.md#what-is-wrong"
_CORRECTION = "docs/policies.md#sampler-and-trainer"
_UPDATES = "docs/training_step.md#several-updates-on-one-batch"
_UNUSABLE = "docs/policies.md#tokens-without-a-finite-log-prob"
_ONE_OFF = "docs/troubleshooting.md#values-one-position-off"
RULES = (
    Rule("nan_loss", ("broken_rules",), _nan_loss, "docs/troubleshooting.md#a-nan-loss"),
    Rule(
        "unusable_tokens",
        ("unusable_tokens", "sampler_log_prob_abs_diff", "loss"),
        _unusable_tokens,
        _UNUSABLE,
    ),
    Rule("equal_rewards", ("equal_rewards",), _equal_rewards, _METRICS),
    Rule("no_reward", ("no_reward",), _no_reward, "docs/choosing_a_loss.md#which-advantages"),
    Rule("first_update", ("ppo_kl", "effective_sample_size"), _first_update, _ONE_OFF),
    Rule("old_samples", ("ppo_kl", "effective_sample_size"), _old_samples, _UPDATES),
    Rule("clipped", ("clip_fraction",), _clipped, _UPDATES),
    Rule(
        "far_tokens",
        ("ratio_min", "ratio_max"),
        _far_tokens,
        "docs/policies.md#what-the-ratio-is-over",
    ),
    Rule(
        "blind_model",
        ("first_in_row_abs_diff", "behind_others_abs_diff"),
        _blind_model,
        "docs/your_model.md#attention-and-positions",
    ),
    Rule(
        "sampler",
        ("sampler_log_prob_abs_diff", "log_prob_abs_diff", "sampler_k3", "k3_kl"),
        _sampler,
        _CORRECTION,
    ),
    Rule("rejected", ("rejected_fraction", "veto_fraction"), _rejected, _CORRECTION),
    Rule(
        "entropy",
        ("entropy", "reward", "pass_rate"),
        _entropy,
        "docs/entropy.md#an-entropy-that-falls",
    ),
    Rule("critic", ("explained_variance",), _critic, "docs/critic.md"),
)
_READ = frozenset(name for rule in RULES for name in rule.reads)


def advise(
    metrics: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, update: int = 0
) -> list[Advice]:
    """What is wrong with a step, by its metrics, and what to do: a sentence for each rule that
    speaks.

    Call it on the host, behind the step. docs/metrics.md lists the rules, what each reads, and
    where its threshold comes from. A rule whose metrics are not there is silent, and metrics that
    no rule reads are ignored.

    Args:
      metrics: those of a step by name: what losses, `mismatch_metrics`, `mismatch.packing_metrics`,
        `advantages.pass_rates` and `advantages.explained_variance` return, before
        `finalize_metrics` or behind it, and the mean "reward" if you have it. A number, or
        `[updates]` for several updates on the same samples. Or a list of such dicts, those of
        consecutive steps, the oldest first: most rules read the last one, and one about entropy
        reads all. Means are over tokens, as by default. `mismatch_metrics` has an
        `effective_sample_size` of its own:
        in a merged dict, keep that of the loss.
      update: how many updates on these samples came before the first number of each step; 0 for
        fresh samples.

    Returns:
      A list of `Advice`; empty where no rule speaks.

    Raises:
      TypeError, ValueError: metrics that are no numbers, or that are still traced; no steps.

    Example:
      >>> rewards, groups = jnp.array([[1.0, 1.0, 0.0, 0.0]]), jnp.array([[7, 7, 8, 8]])
      >>> print(*advise(advantages.pass_rates(rewards, groups)))  # doctest: +ELLIPSIS
      equal_rewards: 100% of the groups have rewards that are all equal and teach nothing: leave them out with ...
    """
    check_count("update", update)
    steps: Any = metrics
    if isinstance(metrics, Mapping):
        steps = [metrics]
    expected = "the metrics of a step by name, or a list of those of several steps"
    good = isinstance(steps, Sequence) and not isinstance(steps, str)
    check_type(
        "metrics", metrics, good and all(isinstance(step, Mapping) for step in steps), expected
    )
    check("metrics", "no steps", len(steps) > 0, expected)
    seen = Seen(tuple(_numbers(step) for step in steps), update)
    advice = []
    for rule in RULES:
        sentence = rule.sentence(seen)
        if sentence is not None:
            advice.append(Advice(rule.name, sentence, rule.page))
    return advice


def _numbers(step: Mapping[str, Any]) -> dict[str, Numbers]:
    """The metrics of a step that rules read, as float64 numbers of each update."""
    numbers = {}
    for name in _READ & step.keys():
        value = step[name]
        if isinstance(value, Metric | Composite):
            value = value.value
        what = f"metrics[{name!r}]"
        expected = "a number, or an array [updates]; call advise on the host, behind jit"
        check_type(what, value, not isinstance(value, jax.core.Tracer), expected)
        array = np.asarray(value)
        is_number = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(
            array.dtype, jnp.integer
        )
        check_type(what, value, is_number, expected)
        check(what, f"shape {array.shape}", array.ndim <= 1, expected)
        numbers[name] = np.atleast_1d(array.astype(np.float64))
    return numbers

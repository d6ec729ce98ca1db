"""Losses of pairs: DPO and its links, IPO, SimPO, ORPO, AOT, which sorts them, and that of
reward models.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Coefficient, check, check_array, check_field, is_number
from jaxppo.base.pytree import PyTree
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.preference.base import (
    Numbers,
    OfPairs,
    PairLoss,
    Responses,
    mean_log_prob,
    preferred,
)
from jaxppo.losses.token_loss import Reads
from jaxppo.policy_losses.base import choice, number
from jaxppo.sharding import Segments

Scores = Float[Array, "R T"]
Link = Literal[
    "sigmoid", "hinge", "robust", "exo", "nca", "apo_zero", "apo_down", "sppo", "discopop"
]
Ranks = Literal["pairs", "responses"]


@dataclasses.dataclass(frozen=True)
class DPO(PairLoss):
    """Direct preference optimisation: -log sigmoid(beta D), D the chosen response's log-ratio less
    the rejected one's.

    The log-ratio of a response is the sum over its loss tokens of log_prob - ref_log_prob. Other
    links take the place of -log sigmoid. With c and r the rewards, beta times the log-ratios of the
    chosen and of the rejected response, h = c - r, s the sigmoid and e the label smoothing:

        sigmoid    -(1 - e) log s(h) - e log s(-h)                           cDPO where e is above 0
        hinge      max(1 - h, 0)                                             SLiC
        robust     (-(1 - e) log s(h) + e log s(-h)) / (1 - 2 e)             unbiased where labels are wrong
        exo        s(h) log(s(h) / (1 - e)) + s(-h) log(s(-h) / e)           reverse KL; e is at least 1e-3
        nca        -log s(c) - log s(-c) / 2 - log s(-r) / 2                 keeps the chosen response likely
        apo_zero   s(-c) + s(r)                                              chosen up, rejected down
        apo_down   s(c) + s(-h)                                              both down, the rejected one more
        sppo       (c - 1/2)^2 + (r + 1/2)^2                                 TRL has this / beta^2
        discopop   (1 - w) (-log s(h)) + w exp(-h), w = s(h / 0.05)

    Args:
      beta: the strength of the pull to the reference, above 0: at 0 the loss is a constant.
      label_smoothing: the probability that a label is wrong, at most 0.5 ("robust": less), for
        links with an e.
      length_normalised: use the means of log-ratios in place of their sums, as TRL's
        "sigmoid_norm".
      link: one of the above.
      nll_coef, nll: see `PairLoss`, errors too; a coefficient of 1 is RPO's.

    Example:
      >>> import dataclasses
      >>> from jaxppo.losses import preference
      >>> samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[4]])
      >>> batch = RolloutBatch.from_samples(samples, row_length=5)
      >>> batch = dataclasses.replace(batch, ref_log_probs=-np.ones((1, 5)))
      >>> now = TokenStats(jnp.array([[-0.5, -0.5, 0.0, -2.0, 0.0]]))  # the log-ratios are 1 and -1
      >>> loss, metrics = loss_from_stats(now, batch, preference.DPO(beta=0.5))
      >>> round(float(loss), 4), float(metrics["reward_margin"].value)
      (0.3133, 1.0)

    Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; cDPO: Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf; hinge: https://arxiv.org/abs/2305.10425; robust:
    https://arxiv.org/abs/2403.00409; EXO: https://arxiv.org/abs/2402.00856; NCA:
    https://arxiv.org/abs/2402.05369; APO: https://arxiv.org/abs/2408.06266; SPPO:
    https://arxiv.org/abs/2405.00675; DiscoPOP: https://arxiv.org/abs/2406.08414
    """

    beta: Coefficient = number(0.1, above=0)
    label_smoothing: Coefficient = number(0.0, least=0, most=0.5)
    length_normalised: bool = False
    link: Link = choice("sigmoid", Link)

    def __post_init__(self) -> None:
        super().__post_init__()
        e = self.label_smoothing if is_number(self.label_smoothing) else None
        check(
            "label_smoothing",
            e,
            self.link != "robust" or e != 0.5,
            "a number below 0.5 with link='robust'",
        )
        good = self.link in ("sigmoid", "robust", "exo") or not e
        check("label_smoothing", e, good, f"0 with link={self.link!r}, which does not read it")
        if self.link == "robust":  # traced numbers
            check_field(self, "label_smoothing", below=0.5)
        elif self.link not in ("sigmoid", "exo"):
            check_field(self, "label_smoothing", most=0)

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        c = self.reward(chosen)
        r = self.reward(rejected)
        e = self.label_smoothing
        right = jax.nn.log_sigmoid(c - r)
        wrong = jax.nn.log_sigmoid(r - c)
        match self.link:
            case "sigmoid":
                return preferred(c - r, e)
            case "hinge":
                return jnp.maximum(1 - (c - r), 0)
            case "robust":
                return -((1 - e) * right - e * wrong) / (1 - 2 * e)
            case "exo":
                e = jnp.maximum(e, 1e-3)
                return jnp.exp(right) * (right - jnp.log1p(-e)) + jnp.exp(wrong) * (
                    wrong - jnp.log(e)
                )
            case "nca":
                return (
                    -jax.nn.log_sigmoid(c)
                    - 0.5 * jax.nn.log_sigmoid(-c)
                    - 0.5 * jax.nn.log_sigmoid(-r)
                )
            case "apo_zero":
                return jax.nn.sigmoid(-c) + jax.nn.sigmoid(r)
            case "apo_down":
                return jax.nn.sigmoid(c) + jax.nn.sigmoid(r - c)
            case "sppo":
                return (c - 0.5) ** 2 + (r + 0.5) ** 2
            case "discopop":  # the exponential is at most exp(20), as for ratios
                share = jax.nn.sigmoid((c - r) / 0.05)
                exponential = jnp.exp(jnp.minimum(r - c, 20.0))
                return (share - 1) * jax.nn.log_sigmoid(c - r) + share * exponential


@dataclasses.dataclass(frozen=True)
class IPO(PairLoss):
    """Identity preference optimisation: (D - 1 / (2 beta))^2, with D as in `DPO`, but of means, as
    in TRL.

    It aims at a fixed difference D rather than the largest one. prime-rl's policy loss "ipo" is
    another loss.

    Args:
      beta: a larger one keeps the policy nearer to the reference; the paper's tau.
      length_normalised: use the means of log-ratios; False takes the paper's sums.
      nll_coef, nll: see `PairLoss`, errors too.

    Example:
      >>> IPO()
      IPO(nll_coef=0.0, nll='sequence_mean_token_mean', beta=0.1, length_normalised=True)

    Azar et al. 2023, https://arxiv.org/abs/2310.12036
    """

    beta: Coefficient = number(0.1, above=0)
    length_normalised: bool = True

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        return (self.log_ratio(chosen) - self.log_ratio(rejected) - 1 / (2 * self.beta)) ** 2


@dataclasses.dataclass(frozen=True)
class SimPO(PairLoss):
    """-log sigmoid(beta (mean log-prob of the chosen response - that of the rejected one) -
    margin), no reference.

    Args:
      beta: multiplies the difference.
      margin: by how much the chosen response is to be ahead; the paper's gamma.
      label_smoothing: see `DPO`.
      nll_coef, nll: see `PairLoss`, errors too; TRL's `cpo_alpha` is a mean over tokens.

    Example:
      >>> SimPO()
      SimPO(nll_coef=0.0, nll='sequence_mean_token_mean', beta=2.0, margin=0.5, label_smoothing=0.0)

    Meng et al. 2024, https://arxiv.org/abs/2405.14734
    """

    reference: ClassVar[bool] = False
    length_normalised = True
    beta: Coefficient = number(2.0, above=0)
    margin: Coefficient = number(0.5, least=0)
    label_smoothing: Coefficient = number(0.0, least=0, most=0.5)

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        return preferred(
            self.reward(chosen) - self.reward(rejected) - self.margin, self.label_smoothing
        )


@dataclasses.dataclass(frozen=True)
class ORPO(PairLoss):
    """The chosen response's mean negative log-likelihood, less beta log sigmoid(log odds - the
    rejected one's).

        log odds = m - log(1 - exp(m)), m the mean log-prob of a response's loss tokens

    The likelihood is over the loss tokens, that is the response, as in the paper. TRL takes the
    mean over all tokens of a micro-batch, prompts included.

    Args:
      beta: the coefficient of the odds; the paper's lambda.
      nll_coef, nll: see `PairLoss`, errors too.

    Example:
      >>> ORPO()
      ORPO(nll_coef=1.0, nll='sequence_mean_token_mean', beta=0.1)

    Hong et al. 2024, https://arxiv.org/abs/2403.07691
    """

    reference: ClassVar[bool] = False
    length_normalised = True
    beta: Coefficient = number(0.1, least=0)
    _: dataclasses.KW_ONLY
    nll_coef: Coefficient = number(1.0, least=0)

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        # a mean log-prob of 0 has infinite odds
        means = (jnp.minimum(mean_log_prob(x), -1e-6) for x in (chosen, rejected))
        better, worse = (mean - jnp.log(-jnp.expm1(mean)) for mean in means)
        return -self.beta * jax.nn.log_sigmoid(better - worse)


@dataclasses.dataclass(frozen=True)
class AOT(PairLoss):
    """Alignment by optimal transport: -log sigmoid(beta (a_(i) - b_(i))), the mean over ranks i of
    the step.

    Of "pairs", a are the policy's differences of log-probs, chosen less rejected, and b the
    reference's. Of "responses", a are the log-ratios of chosen responses and b those of rejected
    ones. Both are sorted over all pairs, so a step must be one micro-batch.

    Args:
      beta: the strength of the pull to the reference.
      label_smoothing: see `DPO`.
      ranks: what is sorted: "pairs" (TRL's "aot") or "responses" ("aot_unpaired").
      nll_coef, nll: see `PairLoss`, errors too.

    Example:
      >>> AOT()
      AOT(nll_coef=0.0, nll='sequence_mean_token_mean', beta=0.1, label_smoothing=0.0, ranks='pairs')

    Melnyk et al. 2024, https://arxiv.org/abs/2406.05882
    """

    beta: Coefficient = number(0.1, above=0)
    label_smoothing: Coefficient = number(0.0, least=0, most=0.5)
    ranks: Ranks = choice("pairs", Ranks)

    def check(self, batch: RolloutBatch) -> None:
        super().check(batch)
        count = batch.micro_batches or 1
        check("batch", f"one of {count} micro-batches", count == 1, f"a whole step for {self}")

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        return preferred(self.reward(chosen) - self.reward(rejected), self.label_smoothing)

    def of_table(
        self, chosen: Responses, rejected: Responses, there: Bool[Array, " N"]
    ) -> Float[Array, " N"]:
        above = chosen.log_ratio
        below = rejected.log_ratio
        if self.ranks == "pairs":
            # of the policy, and of the reference, whose log-prob is log_prob - log_ratio
            above = chosen.log_prob - rejected.log_prob
            below = above - (chosen.log_ratio - rejected.log_ratio)
        order, other = (jnp.argsort(jnp.where(there, y, jnp.inf)) for y in (above, below))
        losses = self(
            chosen._replace(log_ratio=above[order]), rejected._replace(log_ratio=below[other])
        )
        # a loss belongs to the pair that has its rank in `above`
        return jnp.where(there, jnp.zeros_like(above).at[order].set(losses), 0)


@dataclasses.dataclass(frozen=True)
class BradleyTerry(OfPairs[Scores]):
    """-log sigmoid(s_chosen - s_rejected - margin (r_chosen - r_rejected)) + centring (s_chosen +
    s_rejected)^2.

    s are the reward model's scores. r are the batch's rewards, whose difference tells how much
    better one response is. The loss and its metrics are means as in `PreferenceLoss`: scores are
    the rewards, there are no log-probs, and a sample needs a loss token to count. `loss_from_stats`
    takes the output of the model's scalar head, `[R, T]`, as statistics; a sample's score stands at
    its last position.

    Args:
      margin: the coefficient of that difference; 0 uses only which response is better.
      centring: pulls the scores of a pair to a mean of 0, TRL's `center_rewards_coefficient`.

    Raises:
      ValueError: a number below 0.

    Example:
      >>> from jaxppo.losses import preference
      >>> samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[4]])
      >>> batch = RolloutBatch.from_samples(samples, row_length=5)
      >>> scores = jnp.array([[0.0, 0.0, 2.0, 0.0, 1.0]])
      >>> loss, metrics = loss_from_stats(scores, batch, preference.BradleyTerry())
      >>> round(float(loss), 4), float(metrics["accuracy"].value)
      (0.3133, 1.0)

    Bradley and Terry 1952, https://doi.org/10.2307/2334029; the margin: Touvron et al. 2023, Llama
    2, https://arxiv.org/abs/2307.09288; centring: Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244
    """

    of_head: ClassVar[bool] = False
    margin: Coefficient = number(0.0, least=0)
    centring: Coefficient = number(0.0, least=0)

    def __call__(self, chosen: Numbers, rejected: Numbers, distance: Numbers) -> Numbers:
        """The loss of each pair, from its two scores and the difference of its rewards."""
        return (
            preferred(chosen - rejected - self.margin * distance)
            + self.centring * (chosen + rejected) ** 2
        )

    def check_stats(self, stats: PyTree, batch: RolloutBatch) -> None:
        check_array("scores", stats, batch.loss_mask.shape, "the batch's [R, T]")

    def reads(self, stats: Scores | None, batch: RolloutBatch, segments: Segments) -> Reads:
        scores = None if stats is None else segments.spread(self.of_batch(stats, batch, segments))
        return {**super().reads(stats, batch, segments), "scores": scores}

    def seen(self, stats: Scores, mask: Float[Array, "R T"]) -> Scores:
        return stats  # the last position of a sample may have no loss

    def of_batch(
        self, stats: Scores, batch: RolloutBatch, segments: Segments, tokens: Any = None
    ) -> Numbers:
        """The score at the last position of each sequence."""
        inside, positions = (
            x.astype(jnp.float32) for x in (batch.segment_ids > 0, batch.positions)
        )
        is_last = (inside > 0) & (positions == segments.spread(segments.max(positions, inside)))
        return segments.sum(jnp.where(is_last, stats.astype(jnp.float32), 0))

    def of_samples(self, x: Numbers, batch: RolloutBatch, pairs: Any) -> Float[Array, "R S"]:
        margins = pairs.of_chosen(batch.rewards) - pairs.of_rejected(batch.rewards)
        return pairs.to_both(self(pairs.of_chosen(x), pairs.of_rejected(x), margins))

    def sides(self, x: Numbers) -> dict[str, Float[Array, "R S"]]:
        return {"reward": x}

"""The compiled training steps, supervised and GRPO: from tokens to updated parameters."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxppo
from examples.trainer.attention import context_attention, ordered_attention
from examples.trainer.explained import Chosen, choose
from examples.trainer.model import Config, Model, head_of
from jaxppo import (
    SFT,
    Head,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    advantages,
    finalize_metrics,
    loss_from_stats,
)
from jaxppo.batch.trees import check_recurrent
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.explain import ExplainedTokens, explain_tokens
from jaxppo.mismatch import mismatch_metrics
from jaxppo.step.entropy import entropy_metrics

Metrics = dict[str, jax.Array]
_OF_CLIPS = ("clip_fraction", "clip_fraction_positive", "clip_fraction_negative")
_OF_RATIOS = (*_OF_CLIPS, "ppo_kl", "ratio_min", "ratio_mean", "ratio_max")
_OF_SAMPLER = (
    "kl",
    "k3_kl",
    "reverse_k3_kl",
    "log_prob_abs_diff",
    "chi2_sequence",
    "jensen_shannon",
)
_OF_SAMPLER += (
    "token_mult_prob_error",
    "weight_std",
    "weight_min",
    "weight_max",
    "sequence_effective_sample_size",
)
# entropies are averaged over places 0 and 1, and over 2 and more: responses are a few tokens
_PLACES = (0, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that changes from step to step: what a checkpoint holds."""

    params: Any
    """The parameters that learn."""
    optimizer: Any
    reference: Any
    """Those after supervised training, which the KL is to; None without a KL."""
    key: Any
    step: Any
    frozen: Any = None
    """The other parameters, None where all learn.

    They stay what the run began with, and no checkpoint holds them.
    """

    @property
    def variables(self) -> tuple[Any, ...]:
        """All of the model's parameters, as `nnx.merge` takes them."""
        return _variables(self.params, self.frozen)


def _variables(params: Any, frozen: Any) -> tuple[Any, ...]:
    if frozen is None:
        return (params,)
    return (params, frozen)


@dataclasses.dataclass(frozen=True)
class Learner:
    """Loss and optimiser on a mesh. `updates` is how often each batch of rollouts is used.

    `explain` is how many samples of each step are returned with what the loss does with their
    tokens. Equal learners share their compiled steps.
    """

    graphdef: nnx.GraphDef
    model: Config
    parallel: ParallelMesh
    loss: PolicyLossConfig
    optimizer: optax.GradientTransformation
    updates: int
    explain: int = 0

    def start(self, params: nnx.State, seed: int, frozen: nnx.State | None = None) -> TrainState:
        """The state before the first GRPO step, every array on the mesh and no two sharing memory.

        Args:
          params: the parameters that learn: the optimizer has moments of these alone.
          seed: of the sampling.
          frozen: the others, which are not copied.
        """

        return dataclasses.replace(self._start(params, seed), frozen=frozen)

    @partial(jax.jit, static_argnums=(0, 2))
    def _start(self, params: nnx.State, seed: int) -> TrainState:
        key = jax.random.key_data(jax.random.key(seed))
        reference = None
        if self.loss.kl is not None:
            reference = jax.tree.map(jnp.copy, params)
        moments = self.optimizer.init(params)
        return self._pin(TrainState(params, moments, reference, key, jnp.zeros((), jnp.int32)))

    def shardings(self, state: TrainState) -> TrainState:
        """The NamedSharding of each array of the state: that of its parameter for a moment, else
        replicated.
        """
        named = jax.tree.map(self.parallel.sharding, nnx.get_partition_spec(state.params))
        everywhere = self.parallel.sharding(P())
        moments = optax.tree_map_params(
            self.optimizer,
            lambda _, spec: spec,
            state.optimizer,
            named,
            transform_non_params=lambda _: everywhere,
        )
        reference = None if state.reference is None else named
        frozen = jax.tree.map(self.parallel.sharding, nnx.get_partition_spec(state.frozen))
        return TrainState(named, moments, reference, everywhere, everywhere, frozen)

    def _head(self, variables: tuple[Any, ...], batch: RolloutBatch) -> tuple[jax.Array, Head]:
        """The final hidden states, and the head that turns them into logits."""
        model: Model = nnx.merge(self.graphdef, *variables)
        check_recurrent(model, batch)
        if self.model.slots is None:
            attend = context_attention(batch.paths, self.parallel)
        else:
            attend = ordered_attention(batch.paths, batch.paths, self.model.slots, self.parallel)
        return model(batch.tokens, batch.positions, attend), head_of(model, self.model)

    def check_packing(self, variables: tuple[Any, ...]) -> None:
        """Raises AssertionError where hidden states of a sample depend on how it is packed,
        which no loss shows.
        """
        hidden = jax.jit(lambda variables, batch: self._head(variables, batch)[0])
        jaxppo.assert_packing_invariant(
            hidden, variables, vocab_size=self.model.vocab_size, parallel=self.parallel
        )

    def token_stats(
        self,
        variables: tuple[Any, ...],
        batch: RolloutBatch,
        entropy: Literal["none", "metric"] = "none",
    ) -> TokenStats:
        """Log-probs of the targets with loss, without logits.

        From equal hidden states the sampler gets equal bits.
        """
        return jaxppo.log_probs_from_hidden(
            *self._head(variables, batch),
            batch.targets,
            parallel=self.parallel,
            entropy=entropy,
            where=batch.loss_mask > 0,
            deterministic=True,
        )

    def _apply(
        self, loss: jax.Array, params: nnx.State, state: Any, gradients: nnx.State
    ) -> tuple[nnx.State, Any, Metrics]:
        """The updated parameters and optimiser, or the old ones if the loss or a gradient is not
        finite.

        Loss and gradients are sums over the whole mesh, so all devices skip the same updates.
        """
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, updated = self.optimizer.update(gradients, state, params)
        # the choice follows the update, and is no condition around it: every device must run the
        # update's collectives
        choose = partial(jax.tree.map, partial(jnp.where, finite))
        metrics = {"gradient_norm": norm, "skipped": 1 - finite.astype(jnp.float32)}
        return choose(optax.apply_updates(params, updates), params), choose(updated, state), metrics

    @partial(jax.jit, static_argnums=0)
    def sampling_key(self, state: TrainState) -> jax.Array:
        """The key of this step's sampling."""
        return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def sft_step(self, state: TrainState, batch: RolloutBatch) -> tuple[TrainState, Metrics]:
        """One update towards the answers in `batch`."""

        def loss_of(params: nnx.State) -> Any:
            stats = self.token_stats(_variables(params, state.frozen), batch)
            return loss_from_stats(stats, batch, SFT(), parallel=self.parallel)

        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        params, optimizer, more = self._apply(loss, state.params, state.optimizer, gradients)
        state = self._pin(dataclasses.replace(state, params=params, optimizer=optimizer))
        return state, finalize_metrics(metrics) | more

    def _explained(
        self, hidden: jax.Array, head: Head, batch: RolloutBatch
    ) -> ExplainedTokens | None:
        """The loss token by token: one more pass of the head, without gradients; None if nobody
        asked for it.
        """
        if not self.explain:
            return None
        stats = jaxppo.log_probs_from_hidden(
            *lax.stop_gradient((hidden, head)),
            batch.targets,
            parallel=self.parallel,
            entropy=self.loss.entropy_mode,
            where=batch.loss_mask > 0,
        )
        return explain_tokens(stats, batch, self.loss, parallel=self.parallel)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def grpo_step(
        self, state: TrainState, batch: RolloutBatch
    ) -> tuple[TrainState, Metrics, Chosen | None]:
        """`updates` updates on rollouts that carry rewards and the sampler's log-probs.

        Metrics are those of the first update. Those of ratios are of the last update, in whose name
        they have that: the ratios of the first are 1.
        The metric "skipped" counts the updates that were left out, since their loss or gradient was
        not finite. The third result explains the loss of the last update, whose ratios are not all
        1 if there are others.

        The ratio is over the trainer's own log-probs under the parameters that sampled, which are
        computed here. The sampler's log-probs stay in the batch, and `mismatch_*` says how far the
        two are apart. With a ratio to the sampler's log-probs nothing is computed before the
        updates, and `sampler_*` says that.
        """
        old = None
        if self.loss.ratio_to == "old" or self.loss.loss.selects is not None:
            old = self.token_stats(state.variables, batch, "metric")
        by_sample = advantages.grpo(batch.rewards, **batch.groups, parallel=self.parallel)
        batch = dataclasses.replace(
            batch,
            old_log_probs=None if old is None else old.log_probs,
            ref_log_probs=self._reference(state, batch),
            advantages=advantages.spread(by_sample, batch, parallel=self.parallel),
        )
        if old is not None:
            batch = self._with_selected(state, batch, old)

        def loss_of(params: nnx.State) -> Any:
            hidden, head = self._head(_variables(params, state.frozen), batch)
            loss, metrics = jaxppo.policy_loss_from_hidden(
                hidden, head, batch, self.loss, parallel=self.parallel
            )
            return loss, (metrics, self._explained(hidden, head, batch))

        def update(carry: tuple[nnx.State, Any], _: None) -> Any:
            params, optimizer = carry
            (loss, (metrics, explained)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                params
            )
            params, optimizer, more = self._apply(loss, params, optimizer, gradients)
            return (params, optimizer), (finalize_metrics(metrics) | more, explained)

        begin = (state.params, state.optimizer)
        (params, optimizer), (metrics, explained) = lax.scan(update, begin, length=self.updates)
        metrics = _of_updates(metrics, self.updates)
        if old is not None:
            mismatch = finalize_metrics(mismatch_metrics(batch, parallel=self.parallel))
            metrics |= {f"mismatch_{name}": mismatch[name] for name in _OF_SAMPLER}
            metrics |= finalize_metrics(
                entropy_metrics(old, batch, starts=_PLACES, parallel=self.parallel)
            )
        metrics |= finalize_metrics(
            advantages.pass_rates(batch.rewards, **batch.groups, parallel=self.parallel)
        )
        chosen = None
        if explained is not None:
            last = jax.tree.map(lambda x: x[-1], explained)
            chosen = choose(last, batch, self.explain, state.step, self.parallel)
        state = dataclasses.replace(state, params=params, optimizer=optimizer, step=state.step + 1)
        return self._pin(state), metrics, chosen

    def _with_selected(
        self, state: TrainState, batch: RolloutBatch, old: TokenStats
    ) -> RolloutBatch:
        """The batch with the tokens that the loss selects, if it does so."""
        if self.loss.loss.selects is None:
            return batch
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        selected = covariance_mask(old, batch, self.loss, key, self.parallel)
        return dataclasses.replace(batch, extras={"selected": selected})

    def _reference(self, state: TrainState, batch: RolloutBatch) -> jax.Array | None:
        if state.reference is None:
            return None
        return self.token_stats(_variables(state.reference, state.frozen), batch).log_probs

    def _pin(self, state: TrainState) -> TrainState:
        """The state with the shardings that it started with, so that the next step is not
        compiled again.
        """
        return lax.with_sharding_constraint(state, self.shardings(state))


def _of_updates(metrics: Metrics, updates: int) -> Metrics:
    """The metrics of a step from those of its updates, `[updates]` each."""
    ratios = {name: metrics.pop(name)[-1] for name in _OF_RATIOS if name in metrics}
    of_step = {name: x.sum() if name == "skipped" else x[0] for name, x in metrics.items()}
    if updates > 1:
        of_step |= {f"{name}_last_update": x for name, x in ratios.items()}
    return of_step

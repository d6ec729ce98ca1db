"""Random steps of rollouts, and policy losses run on them in every way: packed, sharded, in micro-batches."""

import dataclasses
import functools

import jax
import numpy as np

from jaxppo import (
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    accumulate_gradients,
    covariance_mask,
    policy_loss,
)
from jaxppo.policy_losses import POLICY_LOSSES, find_policy_loss
from sharding import make_parallel_mesh

# These programs run once or a few times: compiling is what they cost.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
LOSSES = sorted(POLICY_LOSSES)


def config_of(loss: str, aggregation: str = "token_mean", **options) -> PolicyLossConfig:
    """A config in which every loss does all that it can: clips, picks, penalises."""
    options = {"kl_coef": 0.1, "entropy_coef": 0.01, "clip_high": 0.28, "cov_ratio": 0.3, "cov_low": 0.0} | options
    if aggregation == "sequence_mean_token_sum_norm":
        options["aggregation_norm"] = 12.0
    return PolicyLossConfig(loss=loss, aggregation=aggregation, **options)


def step_of(seed: int, count: int = 9) -> list[Sample]:
    """Samples with holes in their masks, one of them without a loss token, one without a response.

    Fields that policy losses do not read carry what they do: `returns` the log-probs, `values` the entropies.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 4)), 0 if i == 1 else int(rng.integers(1, 9))
        mask = np.zeros(prompt + response)
        mask[prompt:] = (rng.random(response) < 0.7) * (i != 2)
        normal = functools.partial(rng.normal, size=response)
        old = normal() - 3
        samples.append(
            Sample(
                rng.integers(0, 50, prompt + response),
                response_start=prompt,
                loss_mask=mask,
                sample_id=i,
                group_id=i // 3,
                rollout_id=int(rng.integers(0, 5)),
                advantages=np.full(response, rng.normal()),
                old_log_probs=old,
                ref_log_probs=old + 0.3 * normal(),
                rollout_log_probs=old + 0.1 * normal(),
                returns=old + 0.4 * normal(),
                values=np.abs(normal()),
            )
        )
    return samples


def with_garbage(batch: RolloutBatch, garbage: float) -> RolloutBatch:
    """The batch with `garbage` in each float array wherever there is no loss."""
    arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return dataclasses.replace(
        batch,
        **{
            name: np.where(batch.loss_mask > 0, x, np.float32(garbage))
            for name, x in arrays.items()
            if name != "loss_mask" and x is not None and x.shape == batch.loss_mask.shape and x.dtype == np.float32
        },
    )


def loss_of(stats, batch, config, parallel, normalizer=None, covariance=None):
    return policy_loss(stats, batch, config, parallel=parallel, normalizer=normalizer, covariance=covariance)


def covariance_of(batch, config, parallel):
    if find_policy_loss(config.loss).covariance is None:
        return None
    return covariance_mask(TokenStats(batch.returns), batch, config, jax.random.key(7), parallel)


@functools.cache
def whole(config: PolicyLossConfig, mesh: str | None = None, layout: str = "contiguous", metrics: bool = False):
    """A compiled function of a batch: loss and the gradients of log-probs and entropies; metrics if asked for."""
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)

    def run(batch):
        covariance = covariance_of(batch, config, parallel)
        fn = lambda stats: loss_of(stats, batch, config, parallel, covariance=covariance)  # noqa: E731
        (loss, found), gradients = jax.value_and_grad(fn, has_aux=True)(TokenStats(batch.returns, batch.values))
        gradients = gradients.log_probs, gradients.entropy
        return (loss, gradients, found) if metrics else (loss, gradients)

    return quick_jit(run)


@functools.cache
def accumulated(config: PolicyLossConfig, mesh: str | None = None, metrics: bool = False, explicit: bool = False):
    """The same of stacked micro-batches: gradients come back stacked, each micro-batch having its own log-probs."""
    parallel = mesh and make_parallel_mesh(mesh, explicit=explicit)

    def run(batches):
        normalizer = Normalizer.from_batches(
            batches, config.aggregation, off_policy=config.off_policy, parallel=parallel
        )
        covariance = covariance_of(batches, config, parallel)
        places = np.eye(batches.loss_mask.shape[0], dtype=np.float32)

        def loss_fn(stats, micro_batch):
            place, batch, normalizer, covariance = micro_batch
            # as a sum, since jax 0.12 has no gradient of x[i] on an explicit mesh
            own = jax.tree.map(lambda x: (x * place[:, None, None]).sum(axis=0), stats)
            loss, found = loss_of(own, batch, config, parallel, normalizer, covariance)
            return loss, found if metrics else {}

        step = accumulate_gradients(loss_fn, (places, batches, normalizer, covariance))
        (loss, found), gradients = step(TokenStats(batches.returns, batches.values))
        gradients = gradients.log_probs, gradients.entropy
        return (loss, gradients, found) if metrics else (loss, gradients)

    return quick_jit(run)


def by_sample(x, batch: RolloutBatch, count: int = 9, longest: int = 16) -> np.ndarray:
    """`[samples, positions]` of a packed array of the batch, whatever its packing and layout."""
    out = np.zeros((count, longest), np.float32)
    x, segments, positions = (np.asarray(a).reshape(-1, a.shape[-1]) for a in (x, batch.segment_ids, batch.positions))
    samples = np.asarray(batch.sample_ids).reshape(-1, batch.num_segments)
    rows, columns = np.nonzero(segments)
    out[samples[rows, segments[rows, columns] - 1], positions[rows, columns]] = x[rows, columns]
    return out

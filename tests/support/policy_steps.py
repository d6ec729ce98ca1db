"""Random steps of rollouts, and policy losses on them: packed, sharded, in micro-batches."""

import dataclasses
import functools
from typing import get_args

import jax
import numpy as np

from jaxppo import (
    KL,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    accumulate_gradients,
    policy_loss,
)
from jaxppo.base.arrays import Aggregation
from jaxppo.losses.covariance import covariance_mask
from jaxppo.policy_losses import BY_NAME, PolicyLoss, Reinforce, by_name
from sharding import make_parallel_mesh

# These programs run only a few times, so that nearly all of their time is compiling.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
LOSSES = sorted({*BY_NAME, "dppo_kl"})
AGGREGATIONS = get_args(Aggregation)
ACTIVE = {"clip_low": 0.2, "clip_high": 0.28, "share": 0.3, "low": 0.0}


def loss_named(name: str, **hyperparameters) -> PolicyLoss:
    """The loss, with hyperparameters for which it clips and selects some tokens of small random
    steps.
    """
    name, extra = ("dppo", {"divergence": "kl"}) if name == "dppo_kl" else (name, {})
    fields = {field.name for field in dataclasses.fields(BY_NAME[name])}
    active = {k: v for k, v in ACTIVE.items() if k in fields}
    active = {} if name == "dppo" else active
    return by_name(name, **active | extra | hyperparameters)


def config_of(
    loss: str | PolicyLoss, aggregation: str = "token_mean", **options
) -> PolicyLossConfig:
    """A config with which every loss clips and selects tokens, and has penalties."""
    loss = loss_named(loss) if isinstance(loss, str) else loss
    options = {"kl": KL(0.1), "entropy_coef": 0.01} | options
    if aggregation == "sequence_mean_token_sum_norm":
        options["aggregation_norm"] = 12.0
    return PolicyLossConfig(loss=loss, aggregation=aggregation, **options)


def step_of(seed: int, count: int = 9) -> list[Sample]:
    """Samples with holes in their masks, one of them without a loss token, one without a response.

    Policy losses do not read `returns` and `values`. Here they hold the log-probs and entropies of
    the current policy.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt = int(rng.integers(1, 4))
        response = 0 if i == 1 else int(rng.integers(1, 9))
        mask = np.zeros(prompt + response)
        mask[prompt:] = (rng.random(response) < 0.7) * (i != 2)
        normal = functools.partial(rng.normal, size=response)
        old = -2 - np.abs(normal())

        def near(scale, old=old, normal=normal):
            return np.minimum(old + scale * normal(), -0.01)

        tokens = rng.integers(0, 50, prompt + response)
        tokens[:prompt] = i // 3  # the samples of a group have one prompt
        samples.append(
            Sample(
                tokens,
                response_start=prompt,
                loss_mask=mask,
                sample_id=i,
                group_id=i // 3,
                rollout_id=int(rng.integers(0, 5)),
                advantages=np.full(response, rng.normal()),
                old_log_probs=old,
                ref_log_probs=near(0.3),
                rollout_log_probs=near(0.1),
                returns=near(0.4),
                values=np.abs(normal()),
            )
        )
    return samples


def with_garbage(batch: RolloutBatch, garbage: float) -> RolloutBatch:
    """The batch with `garbage` in each float array at positions without loss."""
    arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return dataclasses.replace(
        batch,
        **{
            name: np.where(batch.loss_mask > 0, x, np.float32(garbage))
            for name, x in arrays.items()
            if name != "loss_mask"
            and getattr(x, "shape", None) == batch.loss_mask.shape
            and x.dtype == np.float32
        },
    )


def loss_of(stats, batch, config, parallel, normalizer=None, selected=None):
    return policy_loss(
        stats, with_selected(batch, selected), config, parallel=parallel, normalizer=normalizer
    )


def with_selected(batch: RolloutBatch, selected) -> RolloutBatch:
    """The batch with the tokens that ClipCov or KLCov select, unless that is None."""
    return batch if selected is None else dataclasses.replace(batch, extras={"selected": selected})


def normalizer_of(
    batch: RolloutBatch, aggregation: str, off_policy=None, parallel=None
) -> Normalizer:
    """The normalizer of a step for any loss with this aggregation and correction."""
    norm = 1.0 if aggregation == "sequence_mean_token_sum_norm" else None
    config = PolicyLossConfig(
        Reinforce(), aggregation=aggregation, aggregation_norm=norm, off_policy=off_policy
    )
    return Normalizer.of(config, batch, parallel=parallel)


def selected_of(batch, config, parallel):
    if config.loss.selects is None:
        return None
    return covariance_mask(TokenStats(batch.returns), batch, config, jax.random.key(7), parallel)


@functools.cache
def whole(
    config: PolicyLossConfig,
    mesh: str | None = None,
    layout: str = "contiguous",
    metrics: bool = False,
):
    """A compiled function of a batch: loss and the gradients of log-probs and entropies; metrics
    if asked for.
    """
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)

    def run(batch):
        selected = selected_of(batch, config, parallel)

        def fn(stats):
            return loss_of(stats, batch, config, parallel, selected=selected)

        (loss, found), gradients = jax.value_and_grad(fn, has_aux=True)(
            TokenStats(batch.returns, batch.values)
        )
        gradients = gradients.log_probs, gradients.entropy
        return (loss, gradients, found) if metrics else (loss, gradients)

    return quick_jit(run)


@functools.cache
def accumulated(
    config: PolicyLossConfig, mesh: str | None = None, metrics: bool = False, explicit: bool = False
):
    """`whole` for stacked micro-batches: gradients come back stacked, and each micro-batch has
    its own log-probs.
    """
    parallel = mesh and make_parallel_mesh(mesh, explicit=explicit)

    def run(batches):
        normalizer = Normalizer.of(config, batches, parallel=parallel)
        selected = selected_of(batches, config, parallel)
        places = np.eye(batches.loss_mask.shape[0], dtype=np.float32)

        def loss_fn(stats, micro_batch):
            place, batch, normalizer, selected = micro_batch
            # as a sum, since jax 0.12 has no gradient of x[i] on an explicit mesh
            own = jax.tree.map(lambda x: (x * place[:, None, None]).sum(axis=0), stats)
            loss, found = loss_of(own, batch, config, parallel, normalizer, selected)
            return loss, found if metrics else {}

        step = accumulate_gradients(loss_fn, (places, batches, normalizer, selected))
        (loss, found), gradients = step(TokenStats(batches.returns, batches.values))
        gradients = gradients.log_probs, gradients.entropy
        return (loss, gradients, found) if metrics else (loss, gradients)

    return quick_jit(run)


def by_sample(x, batch: RolloutBatch, count: int = 9, longest: int = 16) -> np.ndarray:
    """`[samples, positions]` of a packed array of the batch, whatever its packing and layout."""
    out = np.zeros((count, longest), np.float32)
    x, segments, positions = (
        np.asarray(a).reshape(-1, a.shape[-1]) for a in (x, batch.segment_ids, batch.positions)
    )
    samples = np.asarray(batch.sample_ids).reshape(-1, batch.num_segments)
    rows, columns = np.nonzero(segments)
    out[samples[rows, segments[rows, columns] - 1], positions[rows, columns]] = x[rows, columns]
    return out

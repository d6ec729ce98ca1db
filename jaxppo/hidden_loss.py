"""`policy_loss_from_hidden`: hidden states, a head kernel and a batch to a loss, without logits."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.log_probs import log_probs_from_hidden
from jaxppo.loss import check_batch, policy_loss
from jaxppo.metrics import Metrics
from sharding import ParallelMesh, ShardAxes


def policy_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    kernel: Float[Array, "H V"],
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    covariance: Float[Array, "R T"] | None = None,
    **head: Any,
) -> tuple[Float[Array, ""], Metrics]:
    """`policy_loss` after `log_probs_from_hidden`; only tokens that carry loss meet the kernel.

    Args:
      hidden: `[R, T, H]`, see `log_probs_from_hidden`.
      kernel: `[H, V]` or `[V, H]`.
      batch: `[R, T]`, see `policy_loss`; its targets and loss mask say what is computed.
      config: which loss, and the sampler's temperature.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizer: see `policy_loss`.
      covariance: see `policy_loss`.
      **head: `kernel_layout`, `bias`, `logit_softcap`, `keep_ids`, `vocab_size`, `kernel_spec`, `hidden_spec` and
        `block_bytes` of `log_probs_from_hidden`.

    Returns:
      The scalar f32 loss and metrics by name.

    Raises:
      TypeError, ValueError: as the two functions do.

    Example:
      >>> import jax.numpy as jnp
      >>> ids, one = jnp.array([[1, 1, 0]]), jnp.array([[0]])
      >>> mask = jnp.array([[1.0, 1.0, 0.0]])
      >>> old = -jnp.log(4.0) * mask
      >>> batch = RolloutBatch(ids, ids, ids, ids, mask, one, one, one, advantages=mask, old_log_probs=old)
      >>> loss, _ = policy_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, PolicyLossConfig())
      >>> float(loss)
      -1.0
    """
    check_batch(batch, config)
    stats = log_probs_from_hidden(
        hidden,
        kernel,
        batch.targets,
        parallel=parallel,
        temperature=config.temperature,
        entropy=config.entropy_mode,
        where=batch.loss_mask > 0,
        **head,
    )
    return policy_loss(stats, batch, config, parallel=parallel, normalizer=normalizer, covariance=covariance)

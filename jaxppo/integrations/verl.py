"""Translates the configuration of verl's trainers. https://github.com/verl-project/verl"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxppo.integrations.translation import Translation
from jaxppo.policy.verl_reader import read


def translate(config: Mapping[str, Any]) -> Translation:
    """Translates a verl configuration to a policy loss and to arguments of the functions around it.

    Missing keys have verl's defaults. Keys are verl's, as nested mappings (a resolved OmegaConf config is one) or
    joined by dots, as on its command line. In bypass mode the ratio is over the sampler. Only verl's legacy trainer
    reads the other options of that mode, so `rollout_is`, `rollout_rs` and `loss_type` then need
    `trainer.use_v1=False`.

    The numbers are verl's, with two exceptions. Decoupled rejections do not change denominators and penalties; verl
    takes rejected tokens out of both. Covariances and mean weights are over the whole step; verl's are over a
    micro-batch.

    Returns:
      See `Translation`. On each device a micro-batch holds the tokens that `ppo_max_token_len_per_gpu` allows, or the
      places of `ppo_micro_batch_size_per_gpu` padded samples.

    Raises:
      ValueError: unknown keys, all of them listed; a value that its key does not allow, or that has no equivalent here.

    Example:
      >>> found = translate({"actor_rollout_ref.actor.clip_ratio_high": 0.28, "algorithm": {"adv_estimator": "grpo"}})
      >>> found.config.loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
      >>> found.elsewhere
      {'algorithm.adv_estimator': 'jaxppo.advantages'}
    """
    return Translation.of(read(config))

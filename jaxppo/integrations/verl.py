"""The configuration of verl's trainers in the words of this package. https://github.com/verl-project/verl"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxppo.integrations.translation import Translation
from jaxppo.integrations.verl_reader import read


def translate(config: Mapping[str, Any]) -> Translation:
    """A verl configuration as a policy loss and as arguments of the functions around it.

    What is not given has verl's default. Keys are verl's, as nested mappings (a resolved OmegaConf config is one) or
    joined by dots, as on its command line. In bypass mode the ratio is over the sampler; what else that mode means is
    read by verl's legacy trainer alone, so `rollout_is`, `rollout_rs` and `loss_type` want `trainer.use_v1=False` then.

    The numbers are verl's, but for these. Decoupled rejections leave denominators and penalties as they are, where verl
    takes rejected tokens out of both. Covariances and mean weights are of the whole step, not of a micro-batch.

    Args:
      config: keys and values.

    Returns:
      The loss, the head's temperature, `row_length` and `max_tokens` of a batch, and what the other keys are about. A
      micro-batch holds the tokens a device that `ppo_max_token_len_per_gpu` allows, or the places of
      `ppo_micro_batch_size_per_gpu` padded samples.

    Raises:
      ValueError: unknown keys, all listed; a value that is none of its key's, or that this package has no meaning for.

    Example:
      >>> found = translate({"actor_rollout_ref.actor.clip_ratio_high": 0.28, "algorithm": {"adv_estimator": "grpo"}})
      >>> found.config.loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
      >>> found.elsewhere
      {'algorithm.adv_estimator': 'jaxppo.advantages'}
    """
    return Translation.of(read(config))

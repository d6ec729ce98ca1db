"""Translates the arguments of miles, which began as slime. https://github.com/radixark/miles"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxppo.integrations import miles_keys
from jaxppo.integrations.slime import translate_arguments
from jaxppo.integrations.translation import Translation
from jaxppo.policy.config import PolicyLossConfig


def translate(args: Namespace | Mapping[str, Any]) -> Translation:
    """Translates miles's arguments to a `Translation`: a policy loss and arguments of the functions
    around it.

    Its loss is slime's, see `slime.translate`, but for `skip_actor_forward_only`: the ratio is then
    1, and the trainer's log-probs of the corrections are the current ones.

    Args:
      args: the result of miles's `parse_args`, or its names and values.

    Raises:
      ValueError: as `slime.translate`.

    Example:
      >>> from jaxppo.integrations import miles
      >>> translation = miles.translate({"eps_clip_high": 0.28, "skip_actor_forward_only": True, "lora_rank": 16})
      >>> translation.config.ratio_to, translation.elsewhere
      ('current', {'lora_rank': 'LoRA of the head, and adapters of the model'})
    """
    return translate_arguments(args, miles_keys)


def config_of(args: Namespace | Mapping[str, Any]) -> PolicyLossConfig:
    """The policy loss of miles's arguments: the `config` of `translate`, which also says what
    `args` may be.

    Example:
      >>> config_of({"skip_actor_forward_only": True}).ratio_to
      'current'
    """
    return translate(args).config

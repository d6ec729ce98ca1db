"""The arguments of slime in the words of this package. https://github.com/THUDM/slime"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxppo.integrations.slime_reader import read
from jaxppo.integrations.translation import Translation


def translate(args: Namespace | Mapping[str, Any]) -> Translation:
    """slime's arguments as a policy loss and as arguments of the functions around it.

    What is not given has slime's default. Of a `Namespace`, what slime does not define is taken for Megatron's or
    SGLang's; of a mapping it is an error. Mean weights (`tis_batch_normalize`) are of the whole step here, not of a
    micro-batch.

    Args:
      args: what slime's `parse_args` returns, or its names and values, those of the file of `--custom-config-path`
        among them.

    Returns:
      The loss, the head's temperature, `row_length` and `max_tokens` of a batch as far as they are given, and what the
      other arguments are about.

    Raises:
      ValueError: unknown names, all listed; a value that is none of its argument's, or that this package has no meaning
        for.

    Example:
      >>> found = translate({"advantage_estimator": "gspo", "eps_clip": 4e-4, "max_tokens_per_gpu": 9216, "lr": 1e-6})
      >>> found.config.loss, found.config.aggregation
      (GSPO(clip_low=0.0004, clip_high=0.0004, dual_clip=None, gradient='sequence'), 'rollout_mean')
      >>> found.elsewhere
      {'lr': 'the optimizer'}
    """
    return Translation.of(read(args))

"""Translates the arguments of slime. https://github.com/THUDM/slime"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxppo.integrations.translation import Translation
from jaxppo.policy.slime_reader import read


def translate(args: Namespace | Mapping[str, Any]) -> Translation:
    """Translates slime's arguments to a `Translation`: a policy loss and arguments of the functions around it.

    Missing arguments have slime's defaults. An argument that slime does not define is taken for Megatron's or SGLang's
    in a `Namespace`, and is an error in a mapping. Mean weights (`tis_batch_normalize`) are over the whole step here;
    slime's are over a micro-batch.

    Args:
      args: the result of slime's `parse_args`, or its names and values, including those of the file of
        `--custom-config-path`.

    Raises:
      ValueError: unknown names, all of them listed; a value that its argument does not allow, or that has no
        equivalent here.

    Example:
      >>> found = translate({"advantage_estimator": "gspo", "eps_clip": 4e-4, "max_tokens_per_gpu": 9216, "lr": 1e-6})
      >>> found.config.loss, found.config.aggregation
      (GSPO(clip_low=0.0004, clip_high=0.0004, dual_clip=None, gradient='sequence'), 'rollout_mean')
      >>> found.elsewhere
      {'lr': 'the optimizer'}
    """
    return Translation.of(read(args))

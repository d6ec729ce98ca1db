"""MaxText (0.2.5): its batches, and its model's hidden states and head; docs/frameworks.md shows a
whole call.

MaxText's own RL trainer is Tunix's with a `TunixMaxTextAdapter`: for it see
`jaxppo.integrations.tunix`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import Head
from jaxppo.sharding import ParallelMesh

_KEYS = ("inputs", "targets", "inputs_segmentation", "inputs_position", "targets_segmentation")


def batch_of(
    data: Mapping[str, Array],
    *,
    num_segments: int | None = None,
    parallel: ParallelMesh | None = None,
    **arrays: Any,
) -> RolloutBatch:
    """Converts a batch of MaxText, whose targets are already shifted; works under jit.

    A position carries loss where `targets_segmentation` is not 0, as in MaxText's loss, and
    `targets_loss_mask`, if the batch has one, is not 0 either.

    Args:
      data: `i32[R, T]` inputs, targets, inputs_segmentation, inputs_position and
        targets_segmentation; other keys are left alone.
      num_segments: S; needed under jit, by default the largest segment id.
      parallel: the mesh.
      **arrays: the other arrays of the batch (advantages, old_log_probs, ...), at the position that
        predicts; see `RolloutBatch.from_target_aligned`.

    Returns:
      `[R, T]`.

    Raises:
      ValueError: a key that is missing.

    Example:
      >>> ids = jnp.array([[5, 6, 7, 0]])
      >>> some = (ids > 0).astype(jnp.int32)
      >>> data = {"inputs": ids, "targets": jnp.roll(ids, -1, 1), "inputs_segmentation": some,
      ...         "inputs_position": jnp.arange(4)[None], "targets_segmentation": jnp.array([[0, 1, 0, 0]])}
      >>> batch_of(data).loss_mask.tolist()
      [[0.0, 1.0, 0.0, 0.0]]
    """
    missing = [key for key in _KEYS if key not in data]
    if missing:
        raise ValueError(
            f"data: got keys {', '.join(sorted(data))}, expected {', '.join(missing)} too"
        )
    mask = data["targets_segmentation"] != 0
    if "targets_loss_mask" in data:
        mask &= data["targets_loss_mask"] != 0
    return RolloutBatch.from_target_aligned(
        data["inputs"],
        data["targets"],
        data["inputs_segmentation"],
        data["inputs_position"],
        mask.astype(jnp.float32),
        num_segments=num_segments,
        parallel=parallel,
        **arrays,
    )


def hidden_and_head(
    model: Any, decoder_output: Float[Array, "R T H"]
) -> tuple[Float[Array, "R T H"], Head]:
    """The factors of `model.logits_from_hidden_states_for_vocab_tiling(decoder_output)`: hidden
    states and the head.

    The hidden states are the decoder's output after the last norm. There is no dropout, as in
    inference.

    Args:
      model: MaxText's NNX `Transformer`; call this inside the loss, on the model that is
        differentiated.
      decoder_output: `[R, T, H]`, before the last norm.

    Raises:
      TypeError: as `head_of`.
    """
    hidden = model.decoder.decoder_norm(decoder_output)
    return as_head_reads(model, hidden), head_of(model)


def as_head_reads(model: Any, hidden: Float[Array, "R T H"]) -> Float[Array, "R T H"]:
    """The output of the last norm in the dtype in which `logits_dense`, where there is one,
    multiplies it.
    """
    if model.config.logits_via_embedding:
        return hidden
    return hidden.astype(model.decoder.logits_dense.dtype)


def head_of(model: Any) -> Head:
    """The head of a MaxText model, which multiplies the output of the last norm.

    It is `logits_dense` or, with `logits_via_embedding`, the embedding table, which MaxText then
    rounds to bf16. `normalize_embedding_logits` becomes a scale and `final_logits_soft_cap` a
    soft-cap, both for an embedding table only.

    Raises:
      TypeError: a product or weights that are quantised, a bias, an adapter.
    """
    config = model.config
    if config.logits_via_embedding:
        name = "token_embedder"
        module = model.token_embedder
    else:
        name = "decoder.logits_dense"
        module = model.decoder.logits_dense
    # since MaxText's pull request 5313 the product is quantised while the kernel stays float
    quantization = getattr(config, "quantization", "")
    if quantization and getattr(config, "quantize_logits_proj", False):
        raise TypeError(
            f"model.config: got quantize_logits_proj with quantization {quantization!r}, expected a"
            " head whose product is not quantised: jaxppo would multiply its kernel in its own"
            " dtype, with other logits; Head.of(kernel, quantized=Quantization(...)) rounds it by"
            " column, in f32"
        )
    adapters = [attribute for attribute in vars(module) if "lora" in attribute]
    if adapters:
        raise TypeError(
            f"model.{name}: got {', '.join(adapters)}, expected a head without an adapter"
        )
    if not config.logits_via_embedding:
        if module.bias is not None:
            raise TypeError(f"model.{name}: got a bias, expected none, as MaxText makes it")
        return Head.of(module.kernel, layout="hv", dtype=module.dtype)
    table = module.embedding
    scale = 1 / math.sqrt(table.shape[-1]) if config.normalize_embedding_logits else 1.0
    softcap = config.final_logits_soft_cap or None
    return Head.of(table, layout="vh", scale=scale, softcap=softcap, dtype=jnp.bfloat16)

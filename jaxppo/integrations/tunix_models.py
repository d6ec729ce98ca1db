"""Tunix's models without their logits: hidden states, heads, and the log-probs of a forward
pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import check
from jaxppo.head.api import log_probs_from_hidden
from jaxppo.head.call import HeadOptions
from jaxppo.head.head import Head
from jaxppo.integrations import maxtext
from jaxppo.sharding import ParallelMesh

_FORCED = "forced_routed_experts"  # the argument of a model's call that replays a sampler's choices
# the names in Gemma's models and in its configs
_SOFTCAPS = ("final_logits_softcap", "final_logit_softcap")


def head_of(model: Any, *, lora_scale: float | None = None) -> Head:
    """The head of a Tunix model: its `lm_head`, or its embedder where embeddings are tied, with
    Gemma's soft-cap.

    Call it inside the function that is differentiated, so that gradients reach the model.

    Args:
      model: of `tunix.models`: Qwen 2 and 3, Llama 3, Gemma 1 to 4; or MaxText's
        `TunixMaxTextAdapter`.
      lora_scale: alpha / rank of the adapter of the head; see `Head.of`.

    Raises:
      TypeError: a model with neither an `lm_head` nor an embedder; `lora_scale` beside MaxText's,
        whose head has no adapter.
    """
    base = _maxtext_of(model)
    if base is not None:
        if lora_scale is not None:
            expected = "None for a MaxText model, whose head has no adapter"
            raise TypeError(f"lora_scale: got {lora_scale}, expected {expected}")
        return maxtext.head_of(base)
    module = getattr(model, "lm_head", None)
    if module is None:
        module = getattr(model, "embedder", None)
    if module is None:
        raise TypeError(
            f"model: got {type(model).__name__}, expected a Tunix model with an lm_head or an"
            " embedder"
        )
    return Head.of(module, lora_scale=lora_scale, softcap=_softcap(model))


def _softcap(model: Any) -> Any:
    """The soft-cap of a model's logits, or None."""
    for holder in (model, getattr(model, "config", None)):
        for name in _SOFTCAPS:
            softcap = getattr(holder, name, None)
            if softcap:
                return softcap
    return None


def hidden_states(
    model: Any,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attention_mask: Array | None,
    segment_ids: Int[Array, "B T"] | None = None,
    routed_experts: Int[Array, "B T L k"] | None = None,
) -> Float[Array, "B T H"]:
    """The hidden states that the head of a Tunix model multiplies, after its last norm.

    A model whose call takes `skip_lm_head` (the main branch of Tunix) returns them. Of others, and
    of MaxText's adapter, whose `skip_lm_head` returns states before the last norm, a copy that
    shares the model's arrays records the output of the last norm; under jit the logits that it also
    computes do not exist.

    Args:
      model: as for `head_of`.
      tokens: `i32[B, T]`.
      positions: `i32[B, T]`.
      attention_mask: `bool[B, T, T]`.
      segment_ids: `i32[B, T]`, for attention kernels; left out for models whose call does not take
        them.
      routed_experts: integers `[B, T, layers, k]`, the experts that the sampler chose, for models
        whose call takes `forced_routed_experts`; -1 where the model's own router decides.

    Returns:
      `[B, T, H]` in the model's dtype.

    Raises:
      TypeError: a model whose last norm is not known, whose states may be those before it, or that
        never calls it.
    """
    from flax import nnx

    base = _maxtext_of(model)
    if base is None and not hasattr(model, "final_norm"):
        raise TypeError(
            f"model: got {type(model).__name__} without a final_norm, expected one of tunix.models"
            " or MaxText's adapter: the states of another model may be those before its last norm"
        )
    parameters = _parameters_of_call(model)
    arguments: dict[str, Any] = {
        "positions": positions,
        "cache": None,
        "attention_mask": attention_mask,
    }
    if segment_ids is not None:
        for name in ("segment_ids", "decoder_segment_ids"):
            if name in parameters:
                arguments[name] = segment_ids
    if routed_experts is not None:
        if _FORCED not in parameters:
            got = f"got them for {type(model).__name__}, whose call takes no {_FORCED}"
            raise TypeError(
                f"routed_experts: {got}, expected None: the pass would not be the sampler's"
            )
        arguments[_FORCED] = jnp.asarray(routed_experts, jnp.int32)
    if base is None and "skip_lm_head" in parameters:
        hidden: Float[Array, "B T H"] = model(tokens, **arguments, skip_lm_head=True)[0]
        return hidden
    model = nnx.merge(*nnx.split(model))  # the copy is changed, not the model
    if base is None:
        return _output_of_norm(model, model, "final_norm", tokens, arguments)
    states = _output_of_norm(model, _maxtext_of(model).decoder, "decoder_norm", tokens, arguments)
    return maxtext.as_head_reads(base, states)


def _output_of_norm(
    model: Any, holder: Any, name: str, tokens: Int[Array, "B T"], arguments: Mapping[str, Any]
) -> Float[Array, "B T H"]:
    """What the norm `holder.name` returns when the model runs.

    The norm is replaced by one that records it.
    """
    from flax import nnx

    outputs: list[Any] = []

    class Recording(nnx.Module):
        def __init__(self, norm: Any) -> None:
            self.norm = norm

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = self.norm(*args, **kwargs)
            outputs.append(output)
            return output

    setattr(holder, name, Recording(getattr(holder, name)))
    model(tokens, **arguments)
    if not outputs:
        raise TypeError(
            f"model: got {type(model).__name__}, whose call never uses its {name}, expected one"
            " that does"
        )
    return outputs[-1]


def _maxtext_of(model: Any) -> Any:
    """The MaxText model that a `TunixMaxTextAdapter` holds, or None for another model."""
    base = getattr(model, "base", None)
    decoder = getattr(base, "decoder", None)
    if hasattr(decoder, "decoder_norm"):
        return base
    return None


def check_unread(where: str, values: Mapping[str, Any]) -> None:
    """Raises TypeError for what Tunix hands over and nothing here reads; None asks for nothing."""
    unread = sorted(name for name, value in values.items() if value is not None)
    if unread:
        raise TypeError(
            f"{unread[0]}: got it in {where}, which does not read it, expected None; the passes and"
            " losses of jaxppo.integrations.tunix read masks of attention, and none of log-probs"
        )


def _parameters_of_call(model: Any) -> set[str]:
    """The arguments of the model's own `__call__`, which adapters and quantisation hide behind
    *args.
    """
    names: set[str] = set()
    for cls in type(model).__mro__:
        if "__call__" in vars(cls):
            names.update(inspect.signature(vars(cls)["__call__"]).parameters)
    return names


def hidden_of_example(
    model: Any,
    prompt_ids: Int[Array, "B P"],
    completion_ids: Int[Array, "B C"],
    pad_id: int,
    segment_ids: Int[Array, "B C"] | None = None,
    segment_positions: Any = None,
    routed_experts: Int[Array, "B T L k"] | None = None,
    *,
    token_mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T H"]:
    """The hidden states of prompts and completions, `[B, P + C, H]`, padded or packed as Tunix's
    TrainExample is.

    In padded rows tokens attend to the tokens before them, and positions count tokens: those of
    `token_mask`, by default the ids other than `pad_id`. Packed rows (`segment_ids`; the prompts
    are empty) get an attention mask by segment. Tunix gives them no mask, so without flash
    attention its models would attend to everything.
    """
    tokens = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    if segment_ids is None:
        are_tokens = _are_tokens(tokens, pad_id, token_mask, segment_ids)
        counts = jnp.cumsum(are_tokens, axis=1)
        positions = jnp.maximum(counts - 1, 0)
        length = tokens.shape[1]
        attended = jnp.tril(jnp.ones((1, length, length), bool)) & are_tokens[:, None, :]
        return hidden_states(
            model, tokens, positions, attended, are_tokens.astype(jnp.int32), routed_experts
        )
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids > 0)[:, None, :]
    return hidden_states(
        model, tokens, segment_positions, jnp.tril(same), segment_ids, routed_experts
    )


def _are_tokens(
    tokens: Array, pad_id: int, token_mask: Any, segment_ids: Any
) -> Bool[Array, "B T"]:
    """Which ids are tokens: those of the mask, by default those other than the padding's."""
    if token_mask is None:
        return tokens != pad_id
    return checked_mask(token_mask, tokens, segment_ids)


def checked_mask(token_mask: Any, tokens: Any, segment_ids: Any) -> Bool[Array, "B T"]:
    """The mask as booleans.

    Raises ValueError for another shape, and for packed rows, whose segments say the same.
    """
    shape = jnp.shape(token_mask)
    check(
        "token_mask", f"{shape}", shape == tokens.shape, f"{tokens.shape}, prompts and completions"
    )
    check("token_mask", "a mask beside segment_ids", segment_ids is None, "None for packed rows")
    return jnp.asarray(token_mask, bool)


def log_probs(
    model: Any,
    prompt_ids: Int[Array, "B P"],
    completion_ids: Int[Array, "B C"],
    *,
    pad_id: int,
    temperature: float = 1.0,
    segment_ids: Int[Array, "B C"] | None = None,
    segment_positions: Int[Array, "B C"] | None = None,
    routed_experts: Int[Array, "B T L k"] | None = None,
    token_mask: Bool[Array, "B T"] | None = None,
    parallel: ParallelMesh | None = None,
    lora_scale: float | None = None,
    **options: Unpack[HeadOptions],
) -> Float[Array, "B C"]:
    """Log-probs of completion tokens under a Tunix model, without logits: Tunix's
    `compute_per_token_logps`.

    Args:
      model: as for `head_of`.
      prompt_ids: `i32[B, P]`, left-padded; `[B, 0]` for packed rows.
      completion_ids: `i32[B, C]`, right-padded, or packed rows.
      pad_id: of the tokenizer.
      temperature: of the sampler; like Tunix's, 0 divides by nothing.
      segment_ids: of packed rows, 0 is padding.
      segment_positions: of packed rows.
      routed_experts: of prompts and completions, T = P + C; see `hidden_states`.
      token_mask: `bool[B, T]`, which ids of padded rows are tokens; by default those other than
        `pad_id`.
      parallel: the mesh of the model.
      lora_scale: see `head_of`.
      **options: see `HeadOptions`.

    Returns:
      `f32[B, C]`, each at the token that it is about; 0 at padding and at the first token of a
      packed sequence.
    """
    from flax import nnx

    arrays = {
        "segment_ids": segment_ids,
        "segment_positions": segment_positions,
        "routed_experts": routed_experts,
        "token_mask": token_mask,
    }
    graph, state = nnx.split(model)
    static = (pad_id, float(temperature), parallel, lora_scale, tuple(sorted(options.items())))
    result: Float[Array, "B C"] = _log_probs(
        graph, state, prompt_ids, completion_ids, arrays, static
    )
    return result


@partial(jax.jit, static_argnames=("static",))  # a graph is a pytree: it need not have a hash
def _log_probs(
    graph: Any, state: Any, prompt_ids: Any, completion_ids: Any, arrays: Any, static: Any
) -> Any:
    from flax import nnx

    pad_id, temperature, parallel, lora_scale, options = static
    model = nnx.merge(graph, state)
    hidden = hidden_of_example(model, prompt_ids, completion_ids, pad_id, **arrays)
    tokens = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    segments = arrays["segment_ids"]
    is_next = _are_tokens(tokens, pad_id, arrays["token_mask"], segments)
    if segments is not None:
        is_next = (segments > 0) & (segments == jnp.roll(segments, 1, axis=1))
    # nothing predicts the first token of a row
    first = jnp.arange(tokens.shape[1]) < max(prompt_ids.shape[1], 1)
    where = jnp.roll(is_next & ~first[None], -1, axis=1)
    stats = log_probs_from_hidden(
        hidden,
        head_of(model, lora_scale=lora_scale),
        jnp.roll(tokens, -1, axis=1),
        where=where,
        parallel=parallel,
        temperature=temperature or 1.0,
        **dict(options),
    )
    return jnp.roll(stats.log_probs, 1, axis=1)[:, prompt_ids.shape[1] :]

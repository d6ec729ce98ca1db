"""Sizes and settings of a Gemma 3 that reads text, from its folder's config.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from examples.trainer.llama_config import Rope, Settings, Sizes
from examples.trainer.model_folder import read_json

KIND = "gemma3_text"
_LOCAL = "sliding_attention"
_GLOBAL = "full_attention"
# settings of config.json that change the model, with the values that the model has
_ONLY = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "tie_word_embeddings": (True,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
}
# what a file means that does not say it
_DEFAULTS = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}


@dataclasses.dataclass(frozen=True)
class GemmaConfig(Sizes):
    """Sizes of a Gemma 3. Layers are local, with a sliding window, or global."""

    local_rope: Rope
    global_rope: Rope
    window: int
    """A token of a local layer sees so many tokens, itself among them."""
    query_scale: float
    """Scores are products of queries and keys times this."""
    pattern: int
    """Every so manieth layer is global, where `layer_types` is None."""
    layer_types: tuple[str, ...] | None

    @property
    def tied(self) -> bool:
        return True

    def is_local(self, layer: int) -> bool:
        """Whether the layer, counted from 0, has a sliding window."""
        if self.layer_types is None:
            return (layer + 1) % self.pattern != 0
        return self.layer_types[layer] == _LOCAL

    @classmethod
    def read(cls, folder: Path) -> GemmaConfig:
        """Reads config.json.

        Every column of the head counts as a token until `with_tokens` says how many there are.

        Raises:
          ValueError: no config.json, one of another architecture, or one that lacks a setting.
        """
        path = folder / "config.json"
        settings = Settings(path, {**_DEFAULTS, **read_json(path)})
        settings.choice("model_type", (KIND,))
        settings.only(_ONLY)
        local_rope, global_rope = _ropes(settings)
        return cls(
            **settings.sizes(),
            local_rope=local_rope,
            global_rope=global_rope,
            window=settings.count("sliding_window"),
            query_scale=settings.number("query_pre_attn_scalar") ** -0.5,
            pattern=settings.count("sliding_window_pattern"),
            layer_types=_layer_types(settings),
        )


def _ropes(settings: Settings) -> tuple[Rope, Rope]:
    """Those of local and of global layers. Newer files have both in rope_parameters."""
    given = settings.found.get("rope_parameters")
    if given is None:
        return Rope(settings.number("rope_local_base_freq")), settings.rope()
    if not isinstance(given, dict) or not given.get(_LOCAL) or not given.get(_GLOBAL):
        raise settings.error("rope_parameters", given, f"those of {_LOCAL!r} and of {_GLOBAL!r}")

    def of(kind: str) -> Rope:
        found = {**settings.found, "rope_theta": None, "rope_parameters": given[kind]}
        return Settings(settings.path, found).rope()

    return of(_LOCAL), of(_GLOBAL)


def _layer_types(settings: Settings) -> tuple[str, ...] | None:
    """The kind of each layer, None where the file gives a pattern."""
    kinds = settings.found.get("layer_types")
    if kinds is None:
        return None
    expected = f"a list of {_LOCAL!r} and {_GLOBAL!r}, one for each of the num_hidden_layers"
    if not isinstance(kinds, list) or len(kinds) != settings.count("num_hidden_layers"):
        raise settings.error("layer_types", kinds, expected)
    if strange := [kind for kind in kinds if kind not in (_LOCAL, _GLOBAL)]:
        raise settings.error("layer_types", strange[:1], expected)
    return tuple(kinds)

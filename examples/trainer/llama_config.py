"""Sizes and settings of a published model, and those of the Llama kind, read from its folder's
config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from examples.trainer.model_folder import read_json

_DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("llama", "qwen2", "qwen3")
# settings of config.json that change the model, with the values that the model has
_ONLY = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
_GENERATION = "generation_config.json"


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: angles of `theta`^(-2i/D), slowed down as `kind` says."""

    theta: float
    kind: str = "default"
    """"linear" divides all rates by `factor`. "llama3" divides those whose wavelength is above
    original / low, none below original / high, and goes from one to the other in between.
    """
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: float = 8192.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that every model has.

    Columns of `padded_vocab` that belong to no token of the tokenizer are padding.
    """

    vocab_size: int
    padded_vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_length: int
    norm_eps: float
    ends: tuple[int, ...]
    """The ids after which a response is over."""
    dtype: str
    """Products and activations have it; parameters are float32."""
    logits_dtype: str = dataclasses.field(default="float32", kw_only=True)
    """To which the head's products are rounded, in the sampler and in the trainer."""
    slots: int | None = dataclasses.field(default=None, kw_only=True)
    """Sampler and trainer compute the same bits, for sequences of at most so many tokens; see
    chunks.py.
    """

    def with_tokens(self, count: int, longest: int) -> Self:
        """The config with the tokenizer's number of tokens.

        Raises:
          ValueError: more tokens than columns, or sequences of more than the model's positions.
        """
        if count > self.padded_vocab:
            raise ValueError(
                f"--model: got vocab_size {self.padded_vocab} in config.json, expected the {count}"
                " ids of tokenizer.json or more"
            )
        if longest > self.max_length:
            raise ValueError(
                f"--model: got max_position_embeddings {self.max_length}, expected {longest} or"
                " more"
            )
        return dataclasses.replace(self, vocab_size=count)


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Sizes):
    """Sizes of a model of the Llama kind, and which parts it has."""

    rope: Rope
    tied: bool
    """The head is the embeddings."""
    normed: bool
    """Queries and keys have norms."""
    qkv_bias: bool
    out_bias: bool
    """Whether the projection behind attention has a bias."""
    mlp_bias: bool

    @classmethod
    def read(cls, folder: Path) -> LlamaConfig:
        """Reads config.json.

        Every column of the head counts as a token until `with_tokens` says how many there are.

        Raises:
          ValueError: no config.json, one of another architecture, or one that lacks a setting.
        """
        path = folder / "config.json"
        settings = Settings(path, read_json(path))
        kind = settings.choice("model_type", KINDS)
        settings.only(_ONLY)
        kinds = settings.found.get("layer_types") or []
        strange = (
            [x for x in kinds if x != "full_attention"][:1] if isinstance(kinds, list) else kinds
        )
        if strange:
            raise settings.error("layer_types", strange, "'full_attention'")
        biased = settings.flag("attention_bias")
        return cls(
            **settings.sizes(),
            rope=settings.rope(),
            tied=settings.flag("tie_word_embeddings"),
            normed=kind == "qwen3",
            qkv_bias=biased or kind == "qwen2",
            out_bias=biased and kind != "qwen2",
            mlp_bias=kind == "llama" and settings.flag("mlp_bias"),
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of config.json, each checked as it is read."""

    path: Path
    found: dict[str, Any]

    def error(self, name: str, got: Any, expected: str) -> ValueError:
        return ValueError(f"--model: got {name} {got!r} in {self.path}, expected {expected}")

    def only(self, allowed: Mapping[str, Sequence[Any]]) -> None:
        """Raises unless each of these settings is absent, or has one of its allowed values."""
        for name, values in allowed.items():
            if (got := self.found.get(name, values[0])) not in values:
                raise self.error(name, got, repr(values[0]))

    def sizes(self) -> dict[str, Any]:
        """The fields of `Sizes`, where every column of the head counts as a token."""
        heads = self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads")
        if heads % kv_heads:
            raise self.error("num_key_value_heads", kv_heads, f"a divisor of {heads}")
        vocab = self.count("vocab_size")
        width = self.count("hidden_size")
        head_dim = width // heads
        if self.found.get("head_dim") is not None:
            head_dim = self.count("head_dim")
        dtype = "dtype" if "dtype" in self.found else "torch_dtype"
        return {
            "vocab_size": vocab,
            "padded_vocab": vocab,
            "width": width,
            "layers": self.count("num_hidden_layers"),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "mlp_width": self.count("intermediate_size"),
            "max_length": self.count("max_position_embeddings"),
            "norm_eps": self.number("rms_norm_eps"),
            "ends": self.ends(),
            "dtype": self.choice(dtype, _DTYPES, "float32"),
        }

    def number(self, name: str) -> float:
        got = self.found.get(name)
        if isinstance(got, bool) or not isinstance(got, int | float) or not 0 < got < 2**31:
            raise self.error(name, got, "a number above 0, below 2**31")
        return float(got)

    def count(self, name: str) -> int:
        got = self.found.get(name)
        if not isinstance(got, int) or self.number(name) != got:
            raise self.error(name, got, "an integer")
        return got

    def flag(self, name: str) -> bool:
        got = self.found.get(name, False)
        if not isinstance(got, bool):
            raise self.error(name, got, "true or false")
        return got

    def choice(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        got = self.found.get(name, default)
        if got not in allowed:
            raise self.error(name, got, f"one of {', '.join(allowed)}")
        return str(got)

    def rope(self) -> Rope:
        """Newer files have all of it in rope_parameters, older ones have rope_theta beside
        rope_scaling.
        """
        name = "rope_parameters" if self.found.get("rope_parameters") else "rope_scaling"
        given = self.found.get(name) or {}
        kind = (
            given.get("rope_type", given.get("type", "default"))
            if isinstance(given, dict)
            else None
        )
        if kind not in ("default", "linear", "llama3"):
            raise self.error(name, given, "rope_type 'default', 'linear' or 'llama3'")
        inner = Settings(self.path, {**self.found, **given})
        theta = inner.number("rope_theta")
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, kind, inner.number("factor"))
        names = (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        rope = Rope(theta, kind, *map(inner.number, names))
        if rope.low >= rope.high:
            raise self.error(
                "high_freq_factor", rope.high, f"more than the {rope.low} of low_freq_factor"
            )
        return rope

    def ends(self) -> tuple[int, ...]:
        """The ids of eos_token_id, one or several, here and in generation_config.json, which may
        have more.
        """
        path = self.path.with_name(_GENERATION)
        more = read_json(path).get("eos_token_id") if path.exists() else None
        ends: list[int] = []
        for given, found in ((self.path, self.found.get("eos_token_id")), (path, more)):
            for x in found if isinstance(found, list) else [found] * (found is not None):
                if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 2**31:
                    raise ValueError(
                        f"--model: got eos_token_id {found!r} in {given}, expected ids from 0,"
                        " below 2**31"
                    )
                ends += [x] * (x not in ends)
        if not ends:
            raise self.error("eos_token_id", self.found.get("eos_token_id"), "an id, or several")
        return tuple(ends)

"""Sizes of published models, for plans.

Nothing heavy is imported here, so that a command line may name them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """A model's head: hidden size, vocabulary, and whether its kernel is the `[V, H]` embedding."""

    hidden_size: int
    vocab_size: int
    tied: bool = False
    softcap: float | None = None

    @property
    def layout(self) -> Literal["hv", "vh"]:
        if self.tied:
            return "vh"
        return "hv"

    @property
    def kernel_shape(self) -> tuple[int, int]:
        H = self.hidden_size
        V = self.vocab_size
        if self.tied:
            return (V, H)
        return (H, V)


# From the models' published configs; Gemma 3 dropped the soft-cap that Gemma 2 has.
HEADS = {
    "qwen3-0.6b": HeadSizes(1024, 151936, tied=True),
    "qwen3-8b": HeadSizes(4096, 151936),
    "llama3-8b": HeadSizes(4096, 128256),
    "gemma3-4b": HeadSizes(2560, 262208, tied=True),
    "gemma2-2b": HeadSizes(2304, 256000, tied=True, softcap=30.0),
    "gpt2": HeadSizes(768, 50257, tied=True),
}


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """A decoder with grouped queries and gated MLPs."""

    hidden_size: int
    vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    tied: bool = False
    rope_theta: float = 1e6

    @property
    def parameters(self) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
        """Each parameter's shape, and which axes shard its dimensions.

        A parameter of layers has a leading axis L.
        """
        L = self.layers
        H = self.hidden_size
        D = self.head_dim
        wide = (None, "fsdp", "tensor")
        found: dict[str, Any] = {
            "embed": ((self.vocab_size, H), ("fsdp", "tensor")),
            "q": ((L, H, self.heads * D), wide),
            "k": ((L, H, self.kv_heads * D), wide),
            "v": ((L, H, self.kv_heads * D), wide),
            "out": ((L, self.heads * D, H), (None, "tensor", "fsdp")),
            "gate": ((L, H, self.mlp_size), wide),
            "up": ((L, H, self.mlp_size), wide),
            "down": ((L, self.mlp_size, H), (None, "tensor", "fsdp")),
            **dict.fromkeys(("attention_norm", "mlp_norm"), ((L, H), (None, None))),
            **dict.fromkeys(("q_norm", "k_norm"), ((L, D), (None, None))),
            "norm": ((H,), (None,)),
        }
        if self.tied:
            found["embed"] = ((self.vocab_size, H), ("tensor", "fsdp"))
        else:
            found["head"] = ((H, self.vocab_size), ("fsdp", "tensor"))
        return found


# From the models' published configs.
MODELS = {
    "qwen3-0.6b": ModelSizes(1024, 151936, 28, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": ModelSizes(2048, 151936, 28, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": ModelSizes(2560, 151936, 36, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": ModelSizes(4096, 151936, 36, 32, 8, 128, 12288),
    "qwen3-14b": ModelSizes(5120, 151936, 40, 40, 8, 128, 17408),
    "qwen3-32b": ModelSizes(5120, 151936, 64, 64, 8, 128, 25600),
}

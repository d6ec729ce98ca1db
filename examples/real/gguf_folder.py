"""Turns a GGUF file into the folder that `train_grpo --model` reads: config.json, tokenizer.json,
safetensors.

    python -m examples.real.gguf_folder FILE.gguf FOLDER

It knows the Llama architecture and the tokenizer of SmolLM2; others are refused. Quantised weights
become float32. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3  # the kind of a token that is no text


def convert(path: Path, folder: Path) -> None:
    """Writes the folder; config.json last, so that a folder with it is whole.

    Raises:
      ValueError: another architecture or tokenizer, or a tensor that the model does not have.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"path: got {path} of the architecture {kind!r}, expected 'llama'")
    tokenizer, settings = tokenizer_of(fields)  # which may refuse, before the work of the weights
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = dict(_published(tensor, heads) for tensor in reader.tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps(config_of(fields, "lm_head.weight" not in tensors), indent=1)
    )


def _published(tensor: Any, heads: Mapping[str, int]) -> tuple[str, np.ndarray]:
    """A tensor's published name and its weights, in float32."""
    from gguf.quants import dequantize

    shape = [int(n) for n in reversed(tensor.shape)]
    weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
    parts = tensor.name.split(".")
    if parts[0] == "blk" and parts[2] in _LAYER and parts[-1] == "weight":
        if parts[2] in heads:
            weights = halves(weights, heads[parts[2]])
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight", np.ascontiguousarray(weights)
    if parts[0] in _WHOLE and parts[1:] == ["weight"]:
        return f"{_WHOLE[parts[0]]}.weight", np.ascontiguousarray(weights)
    raise ValueError(f"path: got a tensor {tensor.name}, which the model does not have")


def halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows for rotations of (x_i, x_(i + D/2)) from rows for those of neighbours, (x_2i, x_(2i +
    1)), of each head.
    """
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def config_of(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """The settings of config.json."""

    def of(name: str) -> Any:
        return fields[f"llama.{name}"]

    heads = of("attention.head_count")
    width = of("embedding_length")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": fields.get("llama.rope.dimension_count", width // heads),
        "max_position_embeddings": of("context_length"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        # a float32 in the file
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_word_embeddings": tied,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def tokenizer_of(fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tokenizer, and the settings of tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(
            f"path: got a tokenizer {kind}, expected ('gpt2', 'smollm'), which splits as SmolLM2"
            " does"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    settings = {
        "chat_template": fields.get("tokenizer.chat_template"),
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
    }
    return made, settings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="made, and written to")
    args = parser.parse_args(arguments)
    try:
        convert(args.path, args.folder)
    except (ValueError, OSError, KeyError) as error:
        print(f"gguf_folder: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

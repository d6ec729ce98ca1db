"""Writes a tiny random Llama as a GGUF file, as llama.cpp's converter lays its tensors out."""

import numpy as np
import tiny_llama
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers

SETTINGS = {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "head_dim": 8,
    "rope_theta": 10000.0,
}
SETTINGS |= {"hidden_size": 32, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 264}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor"
    " %}<|im_start|>assistant\n"
)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# "12" has no merge: digits stand alone
TOKENS = [*SPECIAL, *LETTERS, "Ġi", "is", "Ġis", "12", "unused"]
MERGES = ["Ġ i", "i s", "Ġi s", "1 2"]


def neighbours(weights, heads):
    """Rows for rotations of neighbours, from rows for those of halves, one by one."""
    size = len(weights) // heads
    turned = np.empty_like(weights)
    for head in range(heads):
        for i in range(size // 2):
            turned[head * size + 2 * i] = weights[head * size + i]
            turned[head * size + 2 * i + 1] = weights[head * size + size // 2 + i]
    return turned


def write(path, architecture="llama", pre="smollm", **more):
    """Writes the file; returns the tensors by their published names."""
    config = {**tiny_llama.CONFIG, **SETTINGS}
    tensors = tiny_llama.tensors(config)
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(
        [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    )
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weights in (tensors | more).items():
        writer.add_tensor(*_laid_out(name, weights, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, tensors


def _laid_out(name, weights, config):
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] != ["model", "layers"]:
        kinds = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }
        return kinds.get(name, name), weights
    kind = NAMES[".".join(parts[3:])]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if kind in heads:
        weights = neighbours(weights, heads[kind])
    return f"blk.{parts[2]}.{kind}.weight", weights

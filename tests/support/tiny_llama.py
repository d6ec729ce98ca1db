"""Writes a tiny random model of the Llama kind, or a Gemma 3, in its published form, by default a
Qwen3: config.json, tokenizer.json, safetensors in one file or several.
"""

import json

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "vocab_size": 272,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 100.0,
    "rope_theta": 10000.0,
}
# as much of Qwen3's as a question needs
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"]


def is_biased(config, name):
    """Whether a projection has a bias."""
    if config["model_type"] == "qwen2":
        return name[-6:] in ("q_proj", "k_proj", "v_proj")
    return config.get("mlp_bias", False) if name.startswith("mlp") else config["attention_bias"]


def tensors(config, seed=0):
    """Every tensor by its published name, matrices as [out, in]."""
    rng = np.random.default_rng(seed)
    width = config["hidden_size"]
    head_dim = config["head_dim"]
    mlp = config["intermediate_size"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        biases = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        biases |= {
            "self_attn.o_proj": width,
            "mlp.gate_proj": mlp,
            "mlp.up_proj": mlp,
            "mlp.down_proj": width,
        }
        layer = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (mlp, width),
            "mlp.up_proj": (mlp, width),
            "mlp.down_proj": (width, mlp),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        if config["model_type"] == "gemma3_text":
            layer |= {"pre_feedforward_layernorm": (width,), "post_feedforward_layernorm": (width,)}
        elif config["model_type"] != "qwen3":
            layer = {
                name: shape
                for name, shape in layer.items()
                if name[-6:] not in ("q_norm", "k_norm")
            }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {
            f"model.layers.{i}.{name}.bias": (n,)
            for name, n in biases.items()
            if is_biased(config, name)
        }
    one = config["model_type"] != "gemma3_text"  # whose norms scale by 1 + weight
    found = {}
    for name, shape in shapes.items():
        mean = one and name.endswith("norm.weight")
        found[name] = rng.normal(mean, 0.15 if len(shape) == 2 else 0.2, shape).astype(np.float32)
    return found


def tokenizer():
    """Bytes and the special tokens of Qwen3."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)  # ids 256 to 260
    return made


def write(folder, shards=1, dtype=np.float32, seed=0, copied_head=True, **settings):
    """Writes the folder; returns its settings and tensors.

    A tied model gets another head, which nothing reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **settings, "torch_dtype": np.dtype(dtype).name}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    found = tensors(config, seed)
    stored = {name: x.astype(dtype) for name, x in found.items()}
    # small models are published with a copy of the head
    if config["tie_word_embeddings"] and copied_head:
        stored["lm_head.weight"] = np.zeros_like(stored["model.embed_tokens.weight"])
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return config, found
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(stored.items())[i::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return config, found


BFLOAT16 = ml_dtypes.bfloat16

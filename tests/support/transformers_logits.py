"""Records the logits of the public implementations of Llama, Qwen 2, Qwen 3 and Gemma 3 on tiny
random models.

    python tests/support/transformers_logits.py llama tests/golden/llama.npz
    python tests/support/transformers_logits.py gemma tests/golden/gemma.npz

It takes torch, transformers, and what tiny_llama.py imports; the tests read the file alone. Each
model has the true architecture with other sizes. Every fourth column is kept.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import tiny_llama

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
MODELS = {
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "head_dim": 6,
    },
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_theta": 100.0,
        "rope_scaling": LLAMA3,
    },
    "biased": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "linear": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "factor": 3.0},
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 6},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_biased": {"model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
}
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 30.0}}
ROPES |= {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}
GEMMAS = {
    "gemma3": tiny_llama.GEMMA,
    "scaled": (
        tiny_llama.GEMMA
        | {
            "query_pre_attn_scalar": 24,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    ),
    "newer": (
        tiny_llama.GEMMA | {"layer_types": KINDS, "num_hidden_layers": 4, "rope_parameters": ROPES}
    ),
}
FILES = {"llama": MODELS, "gemma": GEMMAS}
COLUMNS = slice(None, None, 4)


def sequences():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, n) for n in (11, 6, 30)]


def main(which, path):
    import torch
    import transformers

    torch.set_num_threads(1)
    found = {"versions": np.array([transformers.__version__, torch.__version__])}
    for name, settings in FILES[which].items():
        with tempfile.TemporaryDirectory() as folder:
            tiny_llama.write(Path(folder), copied_head=False, **settings)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            rows = [
                model(torch.tensor(tokens[None])).logits[0, :, COLUMNS].numpy()
                for tokens in sequences()
            ]
        found[name] = np.concatenate(rows).astype(np.float32)
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

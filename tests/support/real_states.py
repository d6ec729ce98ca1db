"""Records hidden states of SmolLM2-135M-Instruct where it samples, and as much of its head as a
small file holds.

    python -m examples.real.smollm2 FOLDER
    python tests/support/real_states.py FOLDER tests/golden/smollm2.npz

It takes torch and transformers; the tests read the file alone. The model answers QUESTIONS at
temperature 1.

Of its 49152 columns KEPT are stored: those of the sampled tokens, RARE ones with the least mass,
and those with the most. The last column stands for all others: its logit is the log of the sum of
their exp(z), so that log z is the true one. Three features hold that logit, since one number of
bfloat16 would round it.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

QUESTIONS = [
    "Write a short story about a lighthouse.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text.",
    "Give me three ideas for dinner with potatoes.",
    "What is 17 times 23? Think step by step.",
    "Translate to French: The weather is nice today.",
    "List the planets of the solar system with a fact about each.",
    "Write a polite letter to a neighbour about noise at night.",
]
TOKENS = 32  # sampled for each question
KEPT = 511
RARE = 24
FAR = -16.0  # a log-prob below it


def sampled(folder):
    """Hidden states f32 [N, H] where the model sampled, and the ids that it took there."""
    import torch
    import transformers
    from torch import nn

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    states = []
    chosen = []
    for question in QUESTIONS:
        turn = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        asked = ids.shape[1]
        with torch.no_grad():
            for _ in range(TOKENS):
                probs = nn.functional.softmax(model(ids).logits[:, -1].double(), dim=-1)
                ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
            hidden = model.model(ids).last_hidden_state[0, asked - 1 : -1]
        states.append(hidden.numpy())
        chosen.append(ids[0, asked:].numpy())
    head = model.lm_head.weight.detach().numpy()
    return np.concatenate(states), np.concatenate(chosen), head.T


def log_sum_exp(z):
    top = z.max(axis=-1, keepdims=True)
    return (top + np.log(np.exp(z - top).sum(axis=-1, keepdims=True)))[..., 0]


def in_three(x):
    """Three numbers of bfloat16, [N, 3], whose sum is x to float32."""
    parts = []
    rest = np.float64(x)
    for _ in range(3):
        parts.append(rest.astype(ml_dtypes.bfloat16))
        rest = rest - np.float64(parts[-1])
    return np.stack(parts, axis=-1)


def main(folder, path):
    hidden, targets, kernel = sampled(Path(folder))
    hidden = hidden.astype(ml_dtypes.bfloat16)
    kernel = kernel.astype(ml_dtypes.bfloat16)
    z = np.float64(hidden) @ np.float64(kernel)
    log_z = log_sum_exp(z)
    log_probs = z - log_z[:, None]
    mass = np.exp(log_probs)
    by_mass = np.argsort(mass.sum(axis=0))
    columns = [*dict.fromkeys([*targets, *by_mass[:RARE], *by_mass[::-1]])][:KEPT]
    others = np.setdiff1d(np.arange(z.shape[1]), columns)
    rest = in_three(log_sum_exp(z[:, others]))
    whole = np.zeros((hidden.shape[1] + 3, KEPT + 1), ml_dtypes.bfloat16)
    whole[:-3, :-1] = kernel[:, columns]
    whole[-3:, -1] = 1
    stored = {"hidden": np.concatenate([hidden, rest], axis=1), "kernel": whole}
    found = {name: x.view(np.uint16) for name, x in stored.items()}  # numpy has no bfloat16
    found |= {
        "targets": np.array([columns.index(t) for t in targets], np.int32),
        "log_probs": np.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0],
        "far_mass": np.where(log_probs < FAR, mass, 0).sum(axis=-1).astype(np.float32),
        "entropy": -(mass * log_probs).sum(axis=-1),
    }
    np.savez_compressed(path, **found)
    kept = mass[:, columns].sum(axis=-1)
    print(
        f"rms {np.sqrt(np.mean(np.float64(hidden) ** 2)):.3g}, largest"
        f" {np.abs(np.float64(hidden)).max():.3g}, "
    )
    print(
        f"logits {z.min():.3g} to {z.max():.3g}, kept mass {kept.mean():.3f}, far"
        f" {found['far_mass'].mean():.2e}"
    )
    print(
        f"log-probs {found['log_probs'].min():.3g}, mean entropy {found['entropy'].mean():.3g},"
        f" {path}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compares a sampler's log-probs with a trainer's, from two files: `python -m jaxppo.mismatch TRAINER SAMPLER`.

A file is an .npy of log-probs, or an .npz with `log_probs`, or one with `hidden` and `kernel` of the same tokens. With
hidden states, KL, total variation and the likeliest token are over the whole vocabulary, and the report tells how much
of the difference rounding explains.
The trainer's .npz may also hold `targets` (needed with hidden), `where`, `positions`, `entropy`, `temperature`; both
may hold `bias`. Arrays of bfloat16 may be stored as numpy stores them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array

from jaxppo.head import Head
from jaxppo.head.head import Layout
from jaxppo.mismatch.report import MismatchReport, mismatch_report
from jaxppo.mismatch.tokens import Rounding, TokenMismatch, token_mismatch

Arrays = dict[str, Any]


def read(path: str | Path) -> Arrays:
    """The arrays of a file by name; an .npy is `log_probs`. Nothing is unpickled."""
    loaded = np.load(path, allow_pickle=False)
    arrays = {"log_probs": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    # numpy stores a dtype that it does not know, such as bfloat16, as raw bytes
    return {name: x.view(ml_dtypes.bfloat16) if x.dtype == "V2" else x for name, x in arrays.items()}


def compare(
    trainer: Arrays, sampler: Arrays, *, layout: Layout = "hv", rounded_to: Rounding = "bfloat16"
) -> TokenMismatch:
    """Compares the tokens of two files; over the whole vocabulary if both hold hidden states."""
    if "hidden" not in trainer or "hidden" not in sampler:
        for name, arrays in (("trainer", trainer), ("sampler", sampler)):
            if "log_probs" not in arrays:
                raise ValueError(
                    f"{name}: got {sorted(arrays)}, expected log_probs, or hidden and kernel in both files"
                )
        return TokenMismatch(trainer["log_probs"], sampler["log_probs"], trainer.get("entropy"))
    if missing := [name for name in ("kernel", "targets") if name not in trainer] + ["kernel"] * (
        "kernel" not in sampler
    ):
        raise ValueError(
            f"{missing[0]}: got none beside hidden, expected kernel in both files, targets in the trainer's"
        )
    targets = jnp.asarray(trainer["targets"])
    row = (1, *targets.shape)[-2:]
    (hidden, head), (rollout_hidden, rollout_head) = (_model(arrays, layout, row) for arrays in (trainer, sampler))
    found = token_mismatch(
        hidden,
        head,
        rollout_hidden,
        rollout_head,
        targets.reshape(row),
        rounded_to=rounded_to,
        temperature=float(trainer.get("temperature", 1.0)),
        where=None if "where" not in trainer else jnp.asarray(trainer["where"] > 0).reshape(row),
    )
    values = {f.name: getattr(found, f.name).reshape(targets.shape) for f in dataclasses.fields(found)}
    return TokenMismatch(**values)


def _model(arrays: Arrays, layout: Layout, row: tuple[int, ...]) -> tuple[Array, Head]:
    """Hidden states `[R, T, H]` and the head."""
    bias = None if "bias" not in arrays else jnp.asarray(arrays["bias"])
    return jnp.asarray(arrays["hidden"]).reshape(*row, -1), Head(jnp.asarray(arrays["kernel"]), bias, layout=layout)


def report(trainer: Arrays, sampler: Arrays, *, bins: int = 8, **how: Any) -> MismatchReport:
    """The report that `main` prints."""
    where = None if "where" not in trainer else trainer["where"] > 0
    found = compare(trainer, sampler, **how)
    return mismatch_report(found, where=where, positions=trainer.get("positions"), bins=bins)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m jaxppo.mismatch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("trainer", help="an .npy or .npz file")
    add("sampler", help="another, of the same tokens")
    add("--bins", type=int, default=8, help="ranges of positions and of entropies")
    add("--layout", choices=("hv", "vh"), default="hv", help="of kernels: [H, V] or [V, H]")
    add("--rounded-to", choices=get_args(Rounding), default="bfloat16", help="hidden states and kernels")
    add("--json", action="store_true", help="all figures, as JSON")
    args = parser.parse_args(arguments)
    try:
        files = read(args.trainer), read(args.sampler)
        found = report(*files, bins=args.bins, layout=args.layout, rounded_to=args.rounded_to)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(dataclasses.asdict(found)) if args.json else found)


if __name__ == "__main__":
    main()

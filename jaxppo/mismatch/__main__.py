"""Compares a sampler's log-probs with a trainer's, from two files: `python -m jaxppo.mismatch TRAINER SAMPLER`.

A file is an .npy of log-probs, or an .npz of `log_probs`, or one of `hidden` and `kernel` of the same tokens. With
hidden states, KL, total variation and the likeliest token are over the whole vocabulary, and the report tells how much
of the difference rounding explains. Arrays are `[R, T]` or `[N]`, hidden states `[R, T, H]` or `[N, H]`.
The trainer's .npz may also hold `where` and `positions`; beside log-probs `entropy`; beside hidden states `targets`,
which it must hold, and `temperature`. Both may hold `bias` beside a kernel. Other names are refused. Arrays of bfloat16
may be stored as numpy stores them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array

from jaxppo.base.arrays import KINDS, check, check_array
from jaxppo.head import Head
from jaxppo.head.head import Layout
from jaxppo.mismatch.report import mismatch_report
from jaxppo.mismatch.tokens import Rounding, TokenMismatch, token_mismatch

Arrays = dict[str, Any]
_FILE = "an .npy or .npz file of numbers"


def read(path: str | Path) -> Arrays:
    """The arrays of a file by name; an .npy is `log_probs`, and a mask of numbers is bool. Nothing is unpickled."""
    check(str(path), "no file", Path(path).is_file(), _FILE)  # a pipe would block
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                _check_size(sum(part.file_size for part in parts.infolist()))
        # a map of the file is refused if the file is shorter than its header says; an .npz is not mapped
        loaded = np.load(path, allow_pickle=False, mmap_mode="r")
        arrays = {"log_probs": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        # numpy stores a dtype that it does not know, such as bfloat16, as raw bytes
        arrays = {name: x.view(ml_dtypes.bfloat16) if x.dtype == "V2" else x for name, x in arrays.items()}
    except Exception as error:  # the readers of a damaged file raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "allow_pickle" in reason:  # numpy takes what it does not know for a pickle, and advises to load it
            reason = "it holds no array of numbers"
        raise ValueError(f"{path}: got a file that numpy cannot read ({reason}), expected {_FILE}") from error
    for name, x in arrays.items():
        check_array(f"{path}: {name}", x, kind=KINDS["where"])
    if "where" in arrays:
        where = arrays["where"] > 0
        check(f"{path}: where", "other numbers than 0 and 1", (arrays["where"] == where).all(), "bool")
        arrays["where"] = where
    return arrays


def _check_size(size: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise MemoryError(f"{size} bytes of arrays, {memory} of memory")


def _check_names(role: str, arrays: Arrays, hidden: bool) -> None:
    """Raises unless a file holds the arrays that a comparison reads from it, and no others."""
    needs, may = (["hidden", "kernel"], ["bias"]) if hidden else (["log_probs"], [])
    if role == "trainer":
        needs += ["targets"] * hidden
        may += ["where", "positions", "temperature" if hidden else "entropy"]
    expected = f"expected {', '.join(needs)}" + (f", and none but {', '.join(may)} beside them" if may else " alone")
    if missing := [name for name in needs if name not in arrays]:
        raise ValueError(f"{role}: got no {missing[0]} among {', '.join(arrays) or 'no arrays'}, {expected}")
    if odd := [name for name in arrays if name not in (*needs, *may)]:
        raise ValueError(f"{role}: got {', '.join(odd)}, {expected}")


def compare(
    trainer: Arrays, sampler: Arrays, *, layout: Layout | None = None, rounded_to: Rounding = "bfloat16"
) -> TokenMismatch:
    """Compares the tokens of two files; over the whole vocabulary if they hold hidden states."""
    hidden = "hidden" in trainer or "hidden" in sampler
    for role, arrays in (("trainer", trainer), ("sampler", sampler)):
        _check_names(role, arrays, hidden)
    if not hidden:
        return TokenMismatch(trainer["log_probs"], sampler["log_probs"], trainer.get("entropy"))
    targets, where, temperature = trainer["targets"], trainer.get("where"), trainer.get("temperature", np.float32(1))
    check("trainer: targets", f"shape {targets.shape}", targets.ndim in (1, 2), "[R, T] or [N]")

    def in_rows(what: str, x: Any, hidden: bool = False) -> Any:
        """An array of tokens as `[R, T, ...]`."""
        expected = f"{targets.shape} of targets, and H" if hidden else f"that of targets, {targets.shape}"
        check(what, f"shape {x.shape}", (x.shape[:-1] if hidden else x.shape) == targets.shape, expected)
        return x.reshape(*(1, *targets.shape)[-2:], *x.shape[targets.ndim :])

    def model(role: str, arrays: Arrays) -> tuple[Array, Head]:
        head = Head(jnp.asarray(arrays["kernel"]), jax.tree.map(jnp.asarray, arrays.get("bias")), layout=layout)
        return jnp.asarray(in_rows(f"{role}: hidden", arrays["hidden"], hidden=True)), head

    scalar = temperature.ndim == 0
    found = token_mismatch(
        *model("trainer", trainer),
        *model("sampler", sampler),
        in_rows("trainer: targets", targets),
        rounded_to=rounded_to,
        temperature=float(temperature) if scalar else jnp.asarray(in_rows("trainer: temperature", temperature)),
        where=None if where is None else in_rows("trainer: where", where),
    )
    return jax.tree.map(lambda x: x.reshape(targets.shape), found)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(
        "python -m jaxppo.mismatch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("trainer", help="an .npy or .npz file")
    add("sampler", help="another, of the same tokens")
    add("--bins", type=int, default=8, help="ranges of positions and of entropies, at most 1000")
    add("--layout", choices=("hv", "vh"), help="of kernels: [H, V], the default, or [V, H]")
    add("--rounded-to", choices=get_args(Rounding), default="bfloat16", help="hidden states and kernels")
    add("--json", action="store_true", help="all figures, as JSON")
    args = parser.parse_args(arguments)
    try:
        trainer, sampler = read(args.trainer), read(args.sampler)
        tokens = compare(trainer, sampler, layout=args.layout, rounded_to=args.rounded_to)
        where, positions = trainer.get("where"), trainer.get("positions")
        found = mismatch_report(tokens, where=where, positions=positions, bins=args.bins)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(dataclasses.asdict(found)) if args.json else found)


if __name__ == "__main__":
    main()

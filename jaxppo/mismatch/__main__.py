"""Compares a sampler's log-probs with a trainer's, from two files:
`python -m jaxppo.mismatch TRAINER SAMPLER`.

A file is an .npy of log-probs, or an .npz of `log_probs`, or one of `hidden` and `kernel` of the
same tokens. With hidden states, KL, total variation and the likeliest token are over the whole
vocabulary, and the report tells how much of the difference rounding explains. Arrays are `[R, T]`
or `[N]`, hidden states `[R, T, H]` or `[N, H]`. The trainer's .npz may also hold `where` and
`positions`; beside log-probs `entropy`; beside hidden states `targets`, which it must hold, and
`temperature`. Both may hold `bias` beside a kernel. Other names are refused. Arrays of bfloat16 may
be stored as numpy stores them.

With --parity it tells where two systems that should have the same bits first differ, and exits with
1 if they do. An .npz holds what was recorded, in the order of computing: `tokens`, `hidden`,
`kernel`, `bias`, `logits` (before the temperature), `temperature`, `support` (ids, -1 for none, or
a mask of the vocabulary), `log_probs`, `stop_ids`. What both hold is compared. The trainer's may
hold `where`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
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
from jaxppo.mismatch.parity import Parity, compare_stages
from jaxppo.mismatch.report import MismatchReport, mismatch_report
from jaxppo.mismatch.tokens import Rounding, TokenMismatch, token_mismatch

Arrays = dict[str, Any]
_FILE = "an .npy or .npz file of numbers"


def read(path: str | Path) -> Arrays:
    """The arrays of a file by name; an .npy is `log_probs`, and a mask of numbers is bool.

    Nothing is unpickled.
    """
    check(str(path), "no file", Path(path).is_file(), _FILE)  # a pipe would block
    try:
        arrays = _load(path)
    except Exception as error:  # the readers of a damaged file raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        # numpy takes what it does not know for a pickle, and advises to load it
        if "allow_pickle" in reason:
            reason = "it holds no array of numbers"
        raise ValueError(
            f"{path}: got a file that numpy cannot read ({reason}), expected {_FILE}"
        ) from error
    for name, x in arrays.items():
        check_array(f"{path}: {name}", x, kind=KINDS["where"])
    if "where" in arrays:
        where = arrays["where"] > 0
        check(
            f"{path}: where", "other numbers than 0 and 1", (arrays["where"] == where).all(), "bool"
        )
        arrays["where"] = where
    return arrays


def _load(path: str | Path) -> Arrays:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            _check_size(sum(member.file_size for member in archive.infolist()))
    # a map of the file is refused if the file is shorter than its header says; an .npz is not
    # mapped
    loaded = np.load(path, allow_pickle=False, mmap_mode="r")
    if isinstance(loaded, np.ndarray):
        loaded = {"log_probs": loaded}
    arrays: Arrays = dict(loaded)
    for name, x in arrays.items():
        # numpy stores a dtype that it does not know, such as bfloat16, as raw bytes
        if x.dtype == "V2":
            arrays[name] = x.view(ml_dtypes.bfloat16)
    return arrays


def _check_size(size: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise MemoryError(f"{size} bytes of arrays, {memory} of memory")


def _check_names(role: str, arrays: Arrays, hidden: bool) -> None:
    """Raises unless a file holds the arrays that a comparison reads from it, and no others."""
    required = ["log_probs"]
    optional = []
    if hidden:
        required = ["hidden", "kernel"]
        optional = ["bias"]
    if role == "trainer":
        optional += ["where", "positions"]
        if hidden:
            required += ["targets"]
            optional += ["temperature"]
        else:
            optional += ["entropy"]
    expected = f"{', '.join(required)} alone"
    if optional:
        expected = f"{', '.join(required)}, and none but {', '.join(optional)} beside them"
    for name in required:
        check(role, f"no {name} among {', '.join(arrays) or 'no arrays'}", name in arrays, expected)
    others = [name for name in arrays if name not in (*required, *optional)]
    check(role, ", ".join(others), not others, expected)


def compare(
    trainer: Arrays,
    sampler: Arrays,
    *,
    layout: Layout | None = None,
    rounded_to: Rounding = "bfloat16",
) -> TokenMismatch:
    """Compares the tokens of two files; over the whole vocabulary if they hold hidden states."""
    hidden = "hidden" in trainer or "hidden" in sampler
    for role, arrays in (("trainer", trainer), ("sampler", sampler)):
        _check_names(role, arrays, hidden)
    if not hidden:
        return TokenMismatch(trainer["log_probs"], sampler["log_probs"], trainer.get("entropy"))
    targets = trainer["targets"]
    check("trainer: targets", f"shape {targets.shape}", targets.ndim in (1, 2), "[R, T] or [N]")
    rows = (1, *targets.shape)[-2:]

    def trainer_rows(name: str) -> Any:
        """An array of the trainer's tokens as `[R, T]`."""
        x = trainer[name]
        check(
            f"trainer: {name}",
            f"shape {x.shape}",
            x.shape == targets.shape,
            f"that of targets, {targets.shape}",
        )
        return x.reshape(rows)

    def hidden_rows(role: str, arrays: Arrays) -> Array:
        x = arrays["hidden"]
        good = x.shape[:-1] == targets.shape
        check(f"{role}: hidden", f"shape {x.shape}", good, f"{targets.shape} of targets, and H")
        return jnp.asarray(x.reshape(*rows, x.shape[-1]))

    def head_of(arrays: Arrays) -> Head:
        return Head(
            jnp.asarray(arrays["kernel"]),
            jax.tree.map(jnp.asarray, arrays.get("bias")),
            layout=layout,
        )

    temperature: Any = trainer.get("temperature", np.float32(1))
    if temperature.ndim == 0:
        temperature = float(temperature)
    else:
        temperature = jnp.asarray(trainer_rows("temperature"))
    where = None
    if "where" in trainer:
        where = trainer_rows("where")
    tokens = token_mismatch(
        hidden_rows("trainer", trainer),
        head_of(trainer),
        hidden_rows("sampler", sampler),
        head_of(sampler),
        trainer_rows("targets"),
        rounded_to=rounded_to,
        temperature=temperature,
        where=where,
    )
    return jax.tree.map(lambda x: x.reshape(targets.shape), tokens)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(
        "python -m jaxppo.mismatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trainer", help="an .npy or .npz file")
    add("sampler", help="another, of the same tokens")
    add("--bins", type=int, default=8, help="ranges of positions and of entropies, at most 1000")
    add("--layout", choices=("hv", "vh"), help="of kernels: [H, V], the default, or [V, H]")
    add(
        "--rounded-to",
        choices=get_args(Rounding),
        default="bfloat16",
        help="hidden states and kernels",
    )
    add("--json", action="store_true", help="all figures, as JSON")
    add(
        "--parity",
        action="store_true",
        help="where the two first differ; none of the options above but --json",
    )
    args = parser.parse_args(arguments)
    others = [args.bins, args.layout, args.rounded_to] != [8, None, "bfloat16"]
    report: MismatchReport | Parity
    try:
        trainer = read(args.trainer)
        sampler = read(args.sampler)
        if args.parity:
            check(
                "--parity", "it beside --bins, --layout or --rounded-to", not others, "none of them"
            )
            report = compare_stages(trainer, sampler)
        else:
            report = _report(trainer, sampler, args)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        print(report)
    if isinstance(report, Parity) and report.first is not None:
        sys.exit(1)


def _report(trainer: Arrays, sampler: Arrays, args: argparse.Namespace) -> MismatchReport:
    tokens = compare(trainer, sampler, layout=args.layout, rounded_to=args.rounded_to)
    where = trainer.get("where")
    return mismatch_report(tokens, where=where, positions=trainer.get("positions"), bins=args.bins)


if __name__ == "__main__":
    main()

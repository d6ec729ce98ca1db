"""The costs of a head on a described pod: time, memory, collectives and flops per device, beside a
plain head's.

    python -m examples.planner.plan_pod --model qwen3-8b --mesh dp=8,cp=8,tp=8 --topology v5p:8x8x8 --tokens 8192
    python -m examples.planner.plan_pod --model qwen3-8b --memory 0.3 0.5 1 2 4
    python -m examples.planner.plan_pod --train --model qwen3-8b --mesh fsdp=16,cp=4,tp=8 --topology v5p:8x8x8
    python -m examples.planner.plan_pod --search --model qwen3-8b --topology v5p:4x4x4 --search-minutes 20

The gradients of a PPO loss with an entropy bonus are compiled by the TPU compiler
(`pip install libtpu`; no TPU is needed), which also estimates their time; all tokens carry loss.
With --memory the head gets each of these numbers of GiB in turn. With --train the whole training
step is compiled, and what it holds is compared with the device's memory. --search does this for
many meshes and numbers of micro-batches, and prints and draws the best plans.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.planner.pod_sizes import HEADS, MODELS, HeadSizes

_MOST_CHIPS = 2**17


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="plan_pod", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    known = sorted({**HEADS, **MODELS})
    add(
        "--model",
        choices=known,
        help="a known head, instead of its two sizes; with --train a model",
    )
    add(
        "--train",
        action="store_true",
        help="the whole training step: whether it fits, and its time",
    )
    add("--rows", type=_count, default=1, help="of each data shard, with --train")
    add("--hidden-size", type=_count, help="of a head that is not known by name")
    add("--vocab-size", type=_count, help="of that head")
    add("--tied", action="store_true", help="the kernel is the [V, H] embedding")
    add("--tokens", type=_count, default=8192, help="on each data and context shard")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of hidden states and kernel",
    )
    add("--mesh", default="cp=4,tp=4", help="such as dp=8,cp=8,tp=8; axes dp, fsdp, cp, tp")
    add(
        "--topology",
        type=_topology,
        default="v5p:2x2x4",
        help="such as v5p:8x8x8, v6e:16x16; h100:8 without --search",
    )
    add("--memory", type=_gib, nargs="*", help="GiB, the curve over them; by default of some")
    add(
        "--search",
        action="store_true",
        help="the best plans of whole training steps; --memory for their head",
    )
    add("--step-tokens", type=_count, default=2**20, help="of a whole step, with --search")
    add("--row-length", type=_count, default=8192, help="tokens of a row, with --search")
    add(
        "--trees",
        type=_share,
        help="share of the rows that trees save, such as 0.6: they are searched too",
    )
    add(
        "--search-minutes",
        type=_minutes,
        default=math.inf,
        help="after which a search ends with what it knows",
    )
    add(
        "--workers",
        type=_count,
        default=os.cpu_count() or 1,
        help="plans that are compiled at the same time",
    )
    add(
        "--cache",
        type=Path,
        default=Path("runs/plans"),
        help="folder that keeps what a search compiled",
    )
    args = parser.parse_args(arguments)
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where arguments do not go together."""
    sizes = (args.hidden_size, args.vocab_size)
    if (args.model is None) == (None in sizes) or (args.model and sizes != (None, None)):
        parser.error("model: expected --model, or --hidden-size and --vocab-size")
    whole = args.train or args.search
    choices = MODELS if whole else HEADS
    if args.model not in choices and (args.model or whole):
        parser.error(f"model: got {args.model}, expected one of {', '.join(choices)}")
    if args.train and args.search:
        parser.error("argument --search: got --train beside it, expected one of them")
    if args.search and args.step_tokens % args.row_length:
        rows = f"a multiple of the {args.row_length} of --row-length"
        parser.error(f"argument --step-tokens: got {args.step_tokens}, expected {rows}")


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text) or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected an integer of at least 1 and below 2**31"
        )
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _gib(text: str) -> float:
    if not 2**-30 <= _number(text) < 2**20:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a number of GiB, from one byte to 2**20"
        )
    return float(text)


def _share(text: str) -> float:
    if not 0 < _number(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number between 0 and 1")
    return float(text)


def _minutes(text: str) -> float:
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of minutes above 0")
    return float(text)


def _topology(text: str) -> str:
    """Refuses a size of 0, with which libtpu crashes. Other errors libtpu reports by itself."""
    match = re.fullmatch(r"\w+:([0-9]{1,6}(?:x[0-9]{1,6})*)", text)
    if match is None or not 0 < math.prod(map(int, match[1].split("x"))) <= _MOST_CHIPS:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected one like v5p:8x8x8, each size at least 1 and at most"
            f" {_MOST_CHIPS} chips"
        )
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)

    import jax  # imported after the arguments are read, so that --help and errors are quick
    import jax.numpy as jnp

    from examples.planner import pod_head
    from examples.planner.pod_step import TrainStep
    from jaxppo.sharding import links

    jax.config.update("jax_platforms", "cpu")  # do not take a real TPU of this machine
    # a program from a cache was not compiled here, so nothing is known of its time
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        if args.search:
            from examples.planner import plan_report  # draws

            return plan_report.search(args)
        parallel = pod_head.described_mesh(args.mesh, args.topology)
        if args.train:
            found = pod_head.plan_train(
                TrainStep(MODELS[args.model], args.tokens, parallel, args.rows)
            )
            print(
                f"{args.model}, {args.rows} x {args.tokens} tokens a shard, {args.mesh},"
                f" {args.topology}\n\n{found}"
            )
            return 0 if found.fits else 1
        head = (
            HEADS[args.model]
            if args.model
            else HeadSizes(args.hidden_size, args.vocab_size, tied=args.tied)
        )
        step = pod_head.Step(head, args.tokens, jnp.dtype(args.dtype), parallel)
        if args.memory is None:
            text = pod_head.table(pod_head.plan(step))
        else:
            text = pod_head.curve_table(pod_head.curve(step, args.memory or pod_head.BUDGETS))
    except ModuleNotFoundError as missing:
        name = (missing.name or "libtpu").replace("_", "-")
        print(f"plan_pod: {name} is missing, expected `pip install {name}`", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"plan_pod: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        print(
            f"plan_pod: the compiler refused the program: {str(error).splitlines()[0]}",
            file=sys.stderr,
        )
        return 1
    print(
        f"{args.model or head}, {args.tokens} tokens a shard, {args.dtype}, {args.mesh} on"
        f" {args.topology}"
    )
    print(_placement(args.topology, links(parallel.mesh)))
    print(text)
    return 0


def _placement(topology: str, along_links: Mapping[str, Sequence[str]]) -> str:
    """Along which links the axes of a mesh lie; nothing for GPUs."""
    if topology.startswith("h100"):
        return ""
    chosen = (f"{name} {' '.join(along)}" for name, along in along_links.items() if along)
    return f"placed along links: {'; '.join(chosen)}\n"


if __name__ == "__main__":
    sys.exit(main())

"""The best plans of a search, as a table and as a picture."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from examples.planner.plan_bounds import Work
from examples.planner.plan_compilers import KINDS, Found
from examples.planner.plan_search import Search, run
from examples.planner.pod_head import BUDGETS, described_devices
from examples.planner.pod_sizes import MODELS
from jaxppo.sharding import known_device

GIB = 2**30
_MEMORIES = 0.5, 2.0  # GiB for the head that are tried beside its default
_TIGHT = 0.1  # memory is short if less than this share of it is free


def search(args: argparse.Namespace) -> int:
    """`plan_pod --search`: searches, prints the table, draws the picture.

    Raises:
      ValueError: libtpu does not know the topology, the chip's figures are unknown, or no plan
        fits.
      ModuleNotFoundError: libtpu is not installed.
    """
    work = work_of(args)
    found = Search(work, _MEMORIES if args.memory is None else args.memory or BUDGETS)
    if not found.fitting:
        raise ValueError(
            f"topology: got {args.topology!r}, where no plan of {found.considered} fits, expected"
            " more chips"
        )
    with contextlib.suppress(KeyboardInterrupt):  # print what was found so far
        run(found, args.cache, minutes=args.search_minutes, workers=args.workers)
    print(f"\n{table(found)}")
    if found.best:
        picture = args.cache / f"{args.model}_{args.topology.replace(':', '_')}.png"
        draw(found, picture)
        print(f"\npicture: {picture}")
    return 0 if found.best else 1


def work_of(args: argparse.Namespace) -> Work:
    """The work that the arguments describe."""
    if args.topology.startswith("h100"):
        raise ValueError(
            f"topology: got {args.topology!r}, expected TPUs: a search takes links between them"
            " into account"
        )
    devices = described_devices(args.topology)
    chip = known_device(devices[0].device_kind)
    if chip is None:
        raise ValueError(
            f"topology: got {args.topology!r} of {devices[0].device_kind}, expected a chip of known"
            " figures"
        )
    rows = args.step_tokens // args.row_length
    return Work(
        args.model,
        MODELS[args.model],
        args.topology,
        chip,
        len(devices),
        rows,
        args.row_length,
        args.trees,
    )


def limits(search: Search, found: Found) -> str:
    """What takes most of a plan's time, and whether memory is short."""
    total = found.ms
    free = _free(search, found)
    kind = max(KINDS, key=found.times.__getitem__)
    name = "sums over devices" if kind == "collectives" else f"compute ({kind})"
    limit = f"{name} {found.times[kind] / total:.0%}"
    if free < _TIGHT * search.work.device.memory / GIB:
        limit += ", memory"
    return limit


def _free(search: Search, found: Found) -> float:
    assert found.needed is not None
    return (search.work.device.memory - found.needed) / GIB


def table(search: Search) -> str:
    """A summary of the search, and a line for each of the best plans."""
    work = search.work
    tried = search.found.values()
    to_compile, unlikely = search.open()
    too_large = sum(not search.fits(f) for f in tried)
    lines = [
        f"{work.model}, {work.rows} rows of {work.row_length} tokens per step, {work.topology}",
        (
            f"{search.considered} plans: {search.considered - search.fitting} cannot fit,"
            f" {len(tried)} compiled, {too_large} of which do not fit"
        ),
    ]
    lines += sorted({f"refused: {f.refused}" for f in tried if f.needed is None})
    if to_compile:
        lines.append(f"the search is not finished: {len(to_compile)} plans may be faster")
    if unlikely:
        lines.append(f"not compiled: {len(unlikely)} plans that are expected to be slower")
    lines += [
        "",
        "ms / step  products  elementwise  copies   sums  beside   GiB   free  limited by",
    ]
    for f in search.best:
        t = f.times
        copies = f.times["copies"] + f.times["kernels"]
        lines.append(f"{f.candidate}")
        lines.append(
            f"{f.ms:9.0f} {t['products']:9.0f} {t['elementwise']:12.0f} {copies:7.0f}"
            f" {t['collectives']:6.0f} {t['overlapped']:7.0f} {(f.needed or 0) / GIB:5.1f}"
            f" {_free(search, f):6.1f}  {limits(search, f)}"
        )
    return "\n".join(lines)


def draw(search: Search, path: Path) -> None:
    """Draws the times of the best plans by kind, and the time and memory of all plans that fit."""
    matplotlib.use("Agg")
    best = search.best
    fitting = [f for f in search.found.values() if search.fits(f)]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4), width_ratios=(3, 2), layout="constrained"
    )
    at: Any = [0.0] * len(best)
    for kind in KINDS:
        ms = [f.times[kind] for f in best]
        left.barh(
            range(len(best)),
            ms,
            left=at,
            label="sums over devices" if kind == "collectives" else kind,
        )
        at = [a + b for a, b in zip(at, ms, strict=True)]
    left.set_yticks(range(len(best)), [str(f.candidate) for f in best])
    left.invert_yaxis()
    left.set_xlabel("ms per step, as the compiler estimates it")
    left.legend(fontsize="small")
    needed = [(f.needed or 0) / GIB for f in fitting]
    right.scatter(needed, [f.ms for f in fitting], s=12)
    right.axvline(search.work.device.memory / GIB, color="gray", linestyle="--")
    right.set_xlabel("GiB a device needs; dashed: what it has")
    right.set_ylabel("ms per step")
    figure.suptitle(
        f"{search.work.model}, {search.work.topology}: {len(fitting)} plans compiled that fit"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

"""Every way to a head's log-probs, entropy and gradients, side by side on the same data in one
process.

    python -m benchmarks.head                                   # the table, the sweeps and the real heads
    python -m benchmarks.head --parts tpu                       # full-size heads, by the TPU compiler (needs libtpu)
    python -m benchmarks.head --here                            # what to paste into an issue: times on this device
    python -m benchmarks.head --parts roofline                  # full-size heads on described H100s (needs gpu-aot)

Times are medians over rounds in which every version runs once; temporaries are the compiled
module's. Each version's gradients are compared with those of the first of its group. Tables go to
the terminal, JSON and plots to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import peers, plots, versions
from benchmarks.cases import PUBLISHED, Case, draw
from benchmarks.measure import compile_step, difference, fits, in_turns, peaks, temporaries
from examples.planner.pod_head import Step, best_plain_stats, described_mesh
from examples.planner.pod_sizes import HEADS, HeadSizes
from jaxppo.__main__ import main as jaxppo_facts
from jaxppo.sharding import Audit, audit

MIB = 2**20
CHIPS = ("v6e:4x4", "v5p:2x2x4")
MESHES = ("tp=16", "cp=16,tp=1", "fsdp=4,tp=4", "fsdp=16")
GROUPS = ("entropy", "log-probs", "values", "part", "policy loss", "policy loss, part")
FORM = "Times on a TPU or a GPU"  # the name of .github/ISSUE_TEMPLATE/timing.yml
Records = list[dict[str, Any]]
Programs = dict[tuple[str, str], Any]  # the key is (group, name)
SWEPT = {  # the versions in the plots, by (group, name)
    versions.FLOOR: "floor",
    "plain: log_softmax, sum of p log p": "entropy",
    "plain: log-sum-exp, mean logit by exp": "entropy",
    f"chunks of {versions.CHUNK} tokens": "entropy",
    "jaxppo": "entropy",
    "jaxppo, one pass": "policy loss",
}


def measured(
    case: Case,
    rounds: int,
    only: dict[str, str] | None = None,
    groups: Sequence[str] = GROUPS,
) -> Records:
    """Times the versions of a case in turns, or `only` some of them (name: group), or those of
    some groups and the bare products; returns a record of each.
    """
    data = draw(case)
    grouped = versions.groups(case)
    if only is None:
        grouped["log-probs"] |= peers.jax_peers(case)
        grouped = {group: grouped[group] for group in ("floor", *groups)}
        others = peers.torch_seconds(case, data, rounds, groups)
        return timed(case, data, compiled_of(grouped, data), rounds, others)
    chosen: dict[str, dict[str, versions.Step]] = {}
    for name, group in only.items():
        chosen.setdefault(group, {})[name] = grouped[group][name]
    return timed(case, data, compiled_of(chosen, data), rounds)


def compiled_of(grouped: dict[str, dict[str, versions.Step]], data: Any) -> Programs:
    """Programs by (group, name), compiled side by side: GPUs try many kernels for each, on
    arrays of its sizes.
    """
    steps: dict[tuple[str, str], versions.Step] = {}
    for group, steps_of_group in grouped.items():
        steps |= {(group, name): step for name, step in steps_of_group.items()}
    logits = 4 * data["hidden"].shape[1] * max(data["kernel"].shape)  # bytes
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    count = max(1, int(min(8, memory // (2 * logits))))
    with ThreadPoolExecutor(count) as threads:
        compiling = {key: threads.submit(compile_step, step, data) for key, step in steps.items()}
    return {key: program.result() for key, program in compiling.items()}


def timed(
    case: Case,
    data: Any,
    programs: Programs,
    rounds: int,
    others: dict[tuple[str, str], peers.Measured] | None = None,
) -> Records:
    """A record of each program, and of each of the others, which took so long.

    What does not fit the memory has no time.
    """
    expected: dict[str, Any] = {}
    records: Records = []
    runs: dict[str, Callable[[], Any]] = {}
    for (group, name), compiled in programs.items():
        record = {"group": group, "version": name, "temporaries_mib": temporaries(compiled) / MIB}
        records.append(record)
        if not fits(compiled):
            continue
        if group != "floor":
            gradients = compiled(data)[1]
            record["difference"] = difference(gradients, expected.setdefault(group, gradients))
        runs[f"{group}/{name}"] = functools.partial(compiled, data)
    seconds = in_turns(runs, rounds)
    for (group, name), other in (others or {}).items():
        size = other.temporary_bytes
        mib = None if size is None else size / MIB
        records.append({"group": group, "version": name, "temporaries_mib": mib})
        seconds[f"{group}/{name}"] = other.seconds
    floor = seconds[f"floor/{versions.FLOOR}"]
    reached = peaks(rounds) if jax.default_backend() == "gpu" else None
    for record in records:
        took = seconds.get(f"{record['group']}/{record['version']}")
        if took is None:
            continue
        record |= {"seconds": took, "over_floor": took / floor}
        if reached is not None:
            record["tflops"] = case.flops / took / 1e12
            record["share_of_matmul_peak"] = case.flops / took / reached["flops_per_second"]
            record["share_of_copy_bandwidth"] = (
                case.least_bytes / took / reached["bytes_per_second"]
            )
    return records


def show(title: str, records: Records) -> None:
    """Prints a table with a column for each key that any record has."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    cells = [columns] + [[_cell(record.get(key)) for key in columns] for record in records]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for row in cells:
        padded = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        print("  ".join(padded).rstrip(), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < value < 1e-3 else f"{value:.3f}"
    return "" if value is None else str(value)


def _title(case: Case) -> str:
    return f"T={case.tokens}, H={case.sizes.hidden_size}, V={case.sizes.vocab_size}, {case.dtype}"


def main_part(args: argparse.Namespace) -> Records:
    """Times all versions at one size, and what a mask saves."""
    case = Case(args.tokens, HeadSizes(args.hidden_size, args.vocab_size), args.dtype, args.share)
    records = measured(case, args.rounds)
    show(f"{_title(case)}; {args.share:.0%} of the tokens in group part", records)
    took = {(r["group"], r["version"]): r["seconds"] for r in records}
    plain = min(r["over_floor"] for r in records if r["version"] in versions.PLAIN)
    print(f"\nover the three matmuls: fastest plain {plain:.3f}")
    full = took["entropy", "jaxppo"]
    over_floor = full / took["floor", versions.FLOOR]
    part = took["part", "jaxppo, where"] / full
    everything = took["entropy", "jaxppo, where all"] / full
    gathered = took["part", "jaxppo, rows gathered"] / full
    print(
        f"jaxppo: {over_floor:.3f}; with a mask of {args.share:.0%} {part:.3f} of its time without,"
        f" with one of all {everything:.3f}"
    )
    print(f"rows gathered first: {gathered:.3f} of jaxppo's")
    return records


def vocabulary_part(args: argparse.Namespace) -> Records:
    """Times over that of the bare products, for several vocabularies."""
    records: Records = []
    for V in args.vocabularies:
        case = Case(args.sweep_tokens, HeadSizes(args.sweep_hidden_size, V), args.dtype)
        found = measured(case, args.rounds, SWEPT)
        show(_title(case), found)
        records += [{"vocab_size": V, **record} for record in found]
    return records


def tokens_part(args: argparse.Namespace) -> Records:
    """Temporaries for several numbers of tokens; nothing runs."""
    records: Records = []
    for tokens in args.token_counts:
        case = Case(tokens, HeadSizes(args.hidden_size, args.vocab_size), args.dtype)
        data = jax.eval_shape(lambda case=case: draw(case))
        grouped = versions.groups(case)
        for name, group in SWEPT.items():
            if group != "floor":
                size = temporaries(compile_step(grouped[group][name], data))
                records.append({"tokens": tokens, "version": name, "temporaries_mib": size / MIB})
    show(f"temporaries by tokens, H={args.hidden_size}, V={args.vocab_size}, {args.dtype}", records)
    return records


def heads_part(args: argparse.Namespace) -> Records:
    """Times heads of published models, with the hidden size divided by --head-scale so that they
    fit.
    """
    records: Records = []
    for name in args.heads:
        sizes = HEADS[name]
        sizes = dataclasses.replace(sizes, hidden_size=max(1, sizes.hidden_size // args.head_scale))
        case = Case(args.head_tokens, sizes, args.dtype)
        found = measured(case, args.rounds, SWEPT)
        show(f"{name}: {_title(case)}", found)
        records += [{"head": name, "hidden_size": sizes.hidden_size, **record} for record in found]
    return records


def tpu_part(args: argparse.Namespace) -> Records:
    """Full-size heads in bf16 by the TPU compiler: estimated times, also over the bare products,
    and temporaries.

    Without --tpu they are all rows of the documented tables, which takes an hour. What is done is
    written after each.
    """
    chips = args.tpu or CHIPS
    if args.tpu:
        cells = list(itertools.product(args.mesh, args.heads, args.tpu_tokens))
    else:
        cells = [("cp=4,tp=4", name, 8192) for name in HEADS]
        cells += [(mesh, "qwen3-8b", 8192) for mesh in MESHES]
        cells.append(("cp=4,tp=4", "qwen3-8b", 32768))
    records: Records = []
    for (mesh, name, tokens), topology in itertools.product(cells, chips):
        records += described(name, HEADS[name], tokens, mesh, topology)
        write(args, "tpu", records)
    return records


def described(name: str, sizes: HeadSizes, tokens: int, mesh: str, topology: str) -> Records:
    """The costs of one head on a mesh over described devices."""
    step = Step(sizes, tokens, jnp.bfloat16, described_mesh(mesh, topology))
    found = [{"version": version, **cost} for version, cost in costs(step).items()]
    show(f"{name}, {tokens} tokens per device, bf16, {mesh} on {topology}", found)
    case = {"topology": topology, "mesh": mesh, "head": name, "tokens_per_shard": tokens}
    return [{**case, **record} for record in found]


def here_part(args: argparse.Namespace) -> Records:
    """Times all versions on the device that is here: heads of published sizes, or on a CPU one
    of --tokens.
    """
    small = Case(args.tokens, HeadSizes(args.hidden_size, args.vocab_size), args.dtype, args.share)
    jaxppo_facts([])
    records: Records = []
    chosen = [case for case in PUBLISHED if case.tokens in args.here_tokens]
    for case in (small,) if jax.default_backend() == "cpu" else chosen:
        found = measured(case, args.rounds, groups=args.groups)
        show(_title(case), found)
        records += [
            {"tokens": case.tokens, **dataclasses.asdict(case.sizes), **record} for record in found
        ]
    print(
        f"\nPlease open an issue in this project's tracker, with the form {FORM!r}, and paste all"
        " of this into it."
    )
    return records


def roofline_part(args: argparse.Namespace) -> Records:
    """Full-size heads in bf16 on described H100s, by a roofline of the kernels that XLA makes
    for them.
    """
    records = described("qwen3-8b", HEADS["qwen3-8b"], 8192, "cp=2,tp=4", "h100:8")
    for case in PUBLISHED:
        name = f"H={case.sizes.hidden_size}, V={case.sizes.vocab_size}"
        records += described(name, case.sizes, case.tokens, "dp=1", "h100:1")
    return records


def costs(step: Step) -> dict[str, dict[str, Any]]:
    """Costs by version.

    `over_products` is computing time divided by that of the bare products, of one for a forward.

    `over_best_plain` is the time of computing and of collectives that nothing overlaps, divided by
    the same time of the best plain JAX.
    """
    on_tpu = step.parallel.mesh.devices.flat[0].platform == "tpu"
    forward, products = (products_time(step, count) for count in (1, 3))
    found: dict[str, dict[str, Any]] = {
        "three products": {"compute_ms": products, "over_products": 1.0}
    }
    ways: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "plain": (step.plain, {}),
        "best plain": (step.plain, {"stats": best_plain_stats}),
        "one pass, no mask": (step.one_pass, {"follow_mask": False}),
        "one pass, a mask": (step.one_pass, {}),
        "two passes": (step.two_passes, {}),
        "two passes, a mask": (step.two_passes, {"where": True}),
        "two passes, kept logits": (step.two_passes, {"memory": versions.KEEPS}),
        "two passes, kept logits, a mask": (
            step.two_passes,
            {"where": True, "memory": versions.KEEPS},
        ),
        "forward": (step.forward, {}),
    }
    if on_tpu:
        ways["one pass, no mask, best plain's memory"] = step.one_pass, {"follow_mask": False}
    for version, (loss, options) in ways.items():
        if version.endswith("memory"):
            options = {**options, "memory": int(found["best plain"]["temporaries_gib"] * 2**30)}
        cost = step.cost(loss, **options)
        assert cost.time is not None
        floor = forward if version.startswith("forward") else products
        found[version] = {
            "compute_ms": cost.time.compute,
            "over_products": cost.time.compute / floor,
            "collectives_ms": cost.time.collectives,
            "temporaries_gib": cost.temp_bytes / 2**30,
            "notes": "; ".join(cost.notes),
        }
        if on_tpu and "pass" in version:
            spent = _total_ms(found[version])
            found[version]["over_best_plain"] = spent / _total_ms(found["best plain"])
        if "a mask" in version:
            computing, waiting = of_a_fifth(cost, step.tokens)
            found[version] |= {
                "fifth_over_all": computing / cost.time.compute,
                "fifth_ms": computing + waiting,
            }
    return found


def _total_ms(record: dict[str, Any]) -> float:
    return record["compute_ms"] + record["collectives_ms"]


def of_a_fifth(cost: Audit, tokens: int) -> tuple[float, float]:
    """Estimated milliseconds of computing, and of sums that it does not hide, if a fifth of the
    tokens have loss.

    The loops of a program that follows a mask run once for each chunk of tokens with loss. The time
    outside of them is the estimate without iterations.
    """
    assert cost.time is not None
    chunk = max(int(n) for note in cost.notes for n in re.findall(r"(\d+) tokens x", note))
    turns = math.ceil(tokens / 5 / chunk) / math.ceil(tokens / chunk)
    nothing = cost.time.least
    everything = cost.time
    computing = nothing.compute + turns * (everything.compute - nothing.compute)
    return computing, nothing.collectives + turns * (everything.collectives - nothing.collectives)


def products_time(step: Step, count: int) -> float:
    """Estimated milliseconds of the first `count` products on a device: logits, the gradients of
    both factors.
    """
    parallel = step.parallel
    sizes = step.sizes
    columns = -(-sizes.vocab_size // parallel.tensor_size)
    shapes = [
        (step.tokens, sizes.hidden_size),
        (sizes.hidden_size, columns),
        (step.tokens, columns),
    ]
    everywhere = parallel.sharding(jax.sharding.PartitionSpec())
    hidden, kernel, z = (
        jax.ShapeDtypeStruct(shape, step.dtype, sharding=everywhere) for shape in shapes
    )
    product = functools.partial(jnp.einsum, preferred_element_type=step.dtype)

    def run(hidden: jax.Array, kernel: jax.Array, z: jax.Array) -> Any:
        found = (
            product("th,hv->tv", hidden, kernel),
            product("tv,hv->th", z, kernel),
            product("th,tv->hv", hidden, z),
        )
        return found[:count]

    time = audit(jax.jit(run, out_shardings=everywhere), hidden, kernel, z).time
    assert time is not None
    return time.compute


PARTS = {
    "main": main_part,
    "vocabulary": vocabulary_part,
    "tokens": tokens_part,
    "heads": heads_part,
    "tpu": tpu_part,
    "here": here_part,
    "roofline": roofline_part,
}
# parts that run only if they are asked for: they need devices, extras or much time
NAMED = ("tpu", "here", "roofline")
DRAWN = {"vocabulary": plots.time_over_vocabulary, "tokens": plots.temporaries_over_tokens}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--parts",
        nargs="+",
        choices=PARTS,
        help="all but tpu, here and roofline by default",
    )
    add("--tokens", type=int, default=2048)
    add("--hidden-size", type=int, default=1024)
    add("--vocab-size", type=int, default=32768)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--rounds", type=int, default=9)
    add("--share", type=float, default=0.2, help="the share of tokens with loss, in group part")
    add("--vocabularies", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    add("--sweep-tokens", type=int, default=1024)
    add("--sweep-hidden-size", type=int, default=512)
    add("--token-counts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    add("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    add("--head-tokens", type=int, default=512)
    add("--head-scale", type=int, default=8)
    add("--tpu", nargs="+", help="topologies, such as v5p:2x2x4 v6e:4x4")
    add("--mesh", nargs="+", default=["cp=4,tp=4"], help="meshes over the topology")
    add(
        "--tpu-tokens",
        type=int,
        nargs="+",
        default=[8192, 32768],
        help="on each data and context shard",
    )
    add("--here", action="store_true", help="the part here alone")
    add("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="of versions, in part here")
    published = [case.tokens for case in PUBLISHED]
    add(
        "--here-tokens",
        type=int,
        nargs="+",
        choices=published,
        default=published,
        help="the published sizes that part here times on an accelerator",
    )
    add("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(arguments)
    if args.parts is None:
        args.parts = (
            ["here"]
            if args.here
            else [part for part in PARTS if part not in NAMED or getattr(args, part, False)]
        )
    if "here" in args.parts:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch comes first
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if args.rounds < 1 or not 0 < args.share <= 1:
        parser.error(
            f"rounds, share: got {args.rounds}, {args.share}, expected at least 1, and above 0 up"
            " to 1"
        )
    return args


def write(args: argparse.Namespace, part: str, records: Records) -> None:
    """Writes the records of a part, with where and how they were made."""
    where = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
    }
    options = {name: value for name, value in vars(args).items() if name not in ("out", "parts")}
    found = {"where": where, "options": options, "records": records}
    (args.out / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        records = PARTS[part](args)
        write(args, part, records)
        if part in DRAWN:
            DRAWN[part](records, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line of train_grpo.py. Nothing here imports JAX: help and refusals come at once."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

EMULATED_DEVICES = 8  # on a machine with nothing but a CPU
HEARTBEAT_S = 30  # a process that is silent for so long counts as gone, and the others end
NEWEST = -1  # checkpoint to resume from
TRY_AGAIN = 75  # exit code of a run that was saved before its end; EX_TEMPFAIL of sysexits.h
MOST = 2**31 - 1  # the largest integer of an argument

# Names that other packages register. Those packages import JAX, so the names are repeated here;
# tests compare them.
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_segment", "striped")
LOSSES = (
    *(
        "aspo",
        "by_sign",
        "cispo",
        "clip_cov",
        "dppo",
        "dro",
        "gmpo",
        "gspo",
        "kl_cov",
        "ppo",
        "probability_mask",
    ),
    *("reinforce", "sapo", "vespo"),
)
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Every flag, with its range and what it is for."""
    about = (
        "Trains a small transformer on verifiable tasks: a short supervised start, then GRPO, on"
        " any mesh."
    )
    whole = _Parser(
        prog="train_grpo.py",
        description=about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = whole.add_argument
    add(
        "--mesh",
        help=(
            "such as dp=2,cp=2,tp=2, the default for 8 devices if tp divides the heads; dp=N"
            " otherwise"
        ),
    )
    add(
        "--devices",
        type=_integer(1),
        help=f"take so many; {EMULATED_DEVICES} emulated ones by default on a CPU, else all",
    )
    add(
        "--context-layout",
        default="contiguous",
        choices=LAYOUTS,
        help="how a row lies over the context shards",
    )
    about = (
        "a generator and verifier of reasoning-gym, or a file FILE.py with functions question(i)"
        " and score(text, entry)"
    )
    add("--task", default="spell_backward", help=about)
    add(
        "--shots",
        type=_integer(0),
        default=0,
        help="worked questions before each, through the chat template of --model",
    )
    add(
        "--response-length",
        type=_integer(1),
        help="the most tokens of a response; those of the longest answer by default",
    )
    add("--steps", type=_integer(0), default=300, help="GRPO steps of the whole run")
    add(
        "--loss", default="ppo", choices=LOSSES, help="the policy loss, see docs/choosing_a_loss.md"
    )
    add(
        "--entropy-coef",
        type=_not_negative,
        default=0.01,
        help="of the entropy, which the loss rewards",
    )
    add(
        "--kl-coef",
        type=_not_negative,
        default=0.0,
        help="of the penalty against the supervised model; 0 for no copy of it",
    )
    add(
        "--ratio-to",
        default="old",
        choices=("old", "rollout"),
        help="log-probs below the ratio: trainer's or sampler's",
    )
    about = (
        "sampler and trainer compute the same bits of every log-prob, at some cost, see"
        " docs/zero_mismatch.md"
    )
    add("--same-bits", action="store_true", help=about)
    about = "to which sampler and trainer round the products of the head"
    add("--logits-dtype", default="float32", choices=("float32", "bfloat16"), help=about)
    add(
        "--seed",
        type=_integer(0),
        default=0,
        help="of the model's parameters, the questions and the sampling",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/grpo"),
        help="folder of metrics, samples, plot and checkpoints",
    )
    old = whole.add_mutually_exclusive_group().add_argument
    old(
        "--resume",
        type=_integer(0),
        nargs="?",
        const=NEWEST,
        metavar="STEP",
        help=(
            "go on from the newest checkpoint in --out, or from that of this step, and forget later"
            " ones"
        ),
    )
    old("--overwrite", action="store_true", help="delete the run that is in --out, and start anew")
    old(
        "--restartable",
        action="store_true",
        help=(
            "for schedulers that start a command again: go on from the newest checkpoint, or start"
            f" without one; exit code {TRY_AGAIN} where it was told to stop before it was done"
        ),
    )
    add(
        "--checkpoint-every",
        type=_integer(1),
        default=50,
        help="steps from one checkpoint to the next",
    )
    add(
        "--evaluate-every",
        type=_integer(1),
        default=25,
        help="steps from one held-out accuracy to the next",
    )
    add(
        "--sft-steps",
        type=_integer(0),
        default=22,
        help="supervised steps before the first GRPO step",
    )
    add("--prompts", type=_integer(1), default=16, help="questions per step")
    add("--samples", type=_integer(2), default=8, help="responses to each question, a group")
    add(
        "--share-prefixes",
        action="store_true",
        help="hold the prompt of a group once: rows packed as trees",
    )
    add("--updates", type=_integer(1), default=2, help="updates on each batch of rollouts")
    add(
        "--train-layers",
        type=_integer(1),
        metavar="N",
        help="train the last N layers alone, or their adapters",
    )
    add(
        "--lora-rank",
        type=_integer(1),
        metavar="R",
        help="adapters of this rank learn, and --model is frozen",
    )
    add(
        "--lora-alpha",
        type=_positive,
        help="adapters are multiplied by alpha / rank; the rank by default",
    )
    about = "the projections of each layer that have adapters; all of these by default"
    add("--lora-targets", nargs="+", choices=LORA_TARGETS, help=about)
    add("--learning-rate", type=_positive, default=1e-3, help="of AdamW, the same at every step")
    add(
        "--spike-deviations",
        type=_positive,
        help="keep the batch of a step whose loss is this many deviations off",
    )
    add(
        "--max-skipped",
        type=_integer(1),
        default=5,
        help="end after so many steps in a row without a finite gradient",
    )
    add(
        "--explain",
        type=_integer(0),
        default=4,
        help="samples of each step whose tokens are explained; 0 for none",
    )
    add(
        "--held-out",
        type=_integer(1),
        default=256,
        help="questions kept out of training, to judge it by",
    )
    add(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="config.json, tokenizer.json and safetensors of a Llama, Qwen 2 or 3, Gemma 3",
    )
    add(
        "--width",
        type=_integer(1),
        default=64,
        help="of the small model that is made without --model",
    )
    add(
        "--layers",
        type=_integer(1),
        default=2,
        help="of the small model that is made without --model",
    )
    add = whole.add_argument_group("processes").add_argument
    add(
        "--processes",
        type=_integer(1),
        default=1,
        help="start so many on this machine, emulated devices shared out",
    )
    add(
        "--distributed",
        action="store_true",
        help="one of many processes; JAX finds them (TPU pod, Slurm, Open MPI)",
    )
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, where nothing finds it; with the next one",
    )
    add(
        "--process-id",
        type=_integer(0),
        metavar="I",
        help="this is the I-th of --processes, which others start",
    )
    add(
        "--heartbeat-timeout",
        type=_integer(10),
        default=HEARTBEAT_S,
        help="seconds without a sign until others end",
    )
    return whole


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments; prints one line and exits with code 2 if one is out of range or does
    not fit another.
    """
    whole = parser()
    args = whole.parse_args(argv)
    if problem := _misfit(args):
        whole.error(problem)
    if args.lora_rank is not None:
        args.lora_alpha = args.lora_alpha or float(args.lora_rank)
        args.lora_targets = [
            name for name in LORA_TARGETS if name in (args.lora_targets or LORA_TARGETS)
        ]
    return args


def _misfit(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments together."""
    if args.shots and args.model is None:
        return (
            f"--shots: got {args.shots} without --model, expected a model that answers as it is"
            " shown"
        )
    if args.lora_rank is not None and args.model is None:
        return (
            f"--lora-rank: got {args.lora_rank} without --model, expected the folder of a model to"
            " adapt"
        )
    for name in ("lora_alpha", "lora_targets"):
        if args.lora_rank is None and getattr(args, name) is not None:
            return f"--{name.replace('_', '-')}: got it without --lora-rank, expected both"
    if (args.coordinator is None) != (args.process_id is None):
        return "--coordinator, --process-id: got one of them, expected both or neither"
    if args.distributed and (args.processes > 1 or args.process_id is not None):
        return "--distributed: got --processes or --process-id beside it, expected JAX to find them"
    if args.process_id is not None and args.process_id >= args.processes:
        return f"--process-id: got {args.process_id}, expected 0 to {args.processes - 1}"
    devices = args.devices or EMULATED_DEVICES
    if devices % args.processes:
        return (
            f"--processes: got {args.processes}, expected a divisor of the {devices} emulated"
            " devices"
        )
    return None


def _integer(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        # int() accepts more than digits, and argparse's own message says less
        if not (
            text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= MOST
        ):
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected an integer of at least {least}, at most {MOST}"
            )
        return int(text)

    return number


def _float(text: str, fits: Callable[[float], bool], expected: str) -> float:
    with contextlib.suppress(ValueError):
        if fits(float(text)) and float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number {expected}")


def _positive(text: str) -> float:
    return _float(text, lambda x: x > 0, "above 0")


def _not_negative(text: str) -> float:
    return _float(text, lambda x: x >= 0, "of at least 0")

"""Trains a small transformer on verifiable tasks: a short supervised start, then GRPO, on any mesh of devices.

python examples/train_grpo.py --out runs/grpo
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import optax
from tqdm import tqdm

from examples.checkpoint import Checkpoints
from examples.learner import Learner, TrainState
from examples.model import ModelConfig, create_model
from examples.report import Report
from examples.rollouts import Packer, Rollouts, answers
from examples.sampler import make_sampler
from examples.tasks import TASKS, Task
from jaxppo import KL, PolicyLossConfig, policy_losses
from sharding import make_parallel_mesh
from sharding.mesh import LAYOUTS

TEMPERATURE = 1.0  # of sampling; the trainer divides logits by the same, which 1 leaves out
EMULATED_DEVICES = 8  # on a machine with nothing but a CPU


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(prog="train_grpo.py", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--mesh", help="such as dp=2,cp=2,tp=2, which is the default for 8 devices; dp=N otherwise")
    add("--context-layout", default="contiguous", choices=LAYOUTS, help="how a row lies over the context shards")
    add("--task", default="spell_backward", choices=sorted(TASKS), help="a generator and verifier of reasoning-gym")
    add("--steps", type=_at_least(0), default=300, help="GRPO steps of the whole run")
    add("--loss", default="ppo", choices=sorted(policy_losses.BY_NAME))
    add("--entropy-coef", type=float, default=0.01)
    add("--kl-coef", type=float, default=0.0, help="of the penalty against the supervised model")
    add("--seed", type=_at_least(0), default=0)
    add(
        "--out", type=Path, default=Path("runs/grpo"), help="metrics, plot and checkpoints; an older run's are replaced"
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    add("--checkpoint-every", type=_at_least(1), default=50, help="steps from one checkpoint to the next")
    add("--sft-steps", type=_at_least(0), default=22, help="supervised steps before the first GRPO step")
    add("--prompts", type=_at_least(1), default=16, help="questions a step")
    add("--samples", type=_at_least(2), default=8, help="responses to each question, a group")
    add("--updates", type=_at_least(1), default=2, help="updates on each batch of rollouts")
    add("--learning-rate", type=_positive, default=1e-3)
    add("--held-out", type=_at_least(1), default=256, help="questions kept out of training, to judge it by")
    add("--width", type=_at_least(1), default=64, help="of the model")
    add("--layers", type=_at_least(1), default=2)
    return parser.parse_args(argv)


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least {least}")
        return int(text)

    return number


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return float(text)


@dataclasses.dataclass
class Run:
    """All that a run is made of, once its arguments are known to be good."""

    task: Task
    rollouts: Rollouts
    pack: Packer
    learner: Learner
    checkpoints: Checkpoints
    state: TrainState
    accuracy_after_sft: float | None


def set_up(args: argparse.Namespace) -> Run:
    """Everything up to the first step, a checkpoint loaded if `--resume` asks for it; raises on any bad argument."""
    _check_writable(args.out)
    devices = jax.devices()
    mesh = args.mesh or ("dp=2,cp=2,tp=2" if len(devices) == 8 else f"dp={len(devices)},cp=1,tp=1")
    parallel = make_parallel_mesh(mesh, context_layout=args.context_layout, devices=devices)
    clip = {"clip_high": 0.28} if args.loss == "ppo" else {}
    kl = KL(args.kl_coef)
    loss = PolicyLossConfig(policy_losses.by_name(args.loss, **clip), kl=kl, entropy_coef=args.entropy_coef)
    batch_size = args.prompts * args.samples
    task = Task(args.task, args.seed, args.held_out)
    longest = task.prompt_length + task.response_length
    config = ModelConfig(len(task.tokenizer.pieces), longest, width=args.width, layers=args.layers)
    graphdef, params = create_model(config, parallel, args.seed)
    sampler = make_sampler(graphdef, config, parallel, task.prompt_length, task.response_length)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.learning_rate, b2=0.95))
    learner = Learner(graphdef, config, parallel, loss, optimizer, args.updates)
    state = learner.start(params, args.seed, position=0)
    identity = {"task": args.task, "seed": args.seed, **dataclasses.asdict(config)}
    rollouts = Rollouts(task, sampler, parallel, batch_size)
    checkpoints = Checkpoints(args.out / "checkpoints", identity, args.resume)
    accuracy = None
    if args.resume:
        state, notes = checkpoints.load(state)
        accuracy = notes["accuracy_after_sft"]
    return Run(task, rollouts, Packer(parallel, batch_size, longest), learner, checkpoints, state, accuracy)


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out: got {folder}, expected a folder that can be written to ({error.strerror})") from None


def supervised(run: Run, args: argparse.Namespace) -> None:
    """A short imitation of right answers, and the accuracy that GRPO starts from."""
    position = 0
    for _ in tqdm(range(args.sft_steps), desc="sft", unit="step", dynamic_ncols=True):
        questions, position = run.task.take(position, run.rollouts.batch_size)
        run.state, _ = run.learner.sft_step(run.state, run.pack(answers(questions)))
    run.state = run.learner.start(run.state.params, args.seed, position)
    run.accuracy_after_sft = run.rollouts.held_out_accuracy(run.state.params)
    print(f"held-out accuracy after SFT: {run.accuracy_after_sft:.1%} of {args.held_out}")
    run.checkpoints.save(run.state, {"accuracy_after_sft": run.accuracy_after_sft})


def grpo_step(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Samples, scores, packs and learns once; returns what to report."""
    began = time.perf_counter()
    state, step = run.state, int(run.state.step)
    questions, position = run.task.take(int(state.position), args.prompts)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), step)
    samples = run.rollouts.sample(state.params, questions, args.samples, key, TEMPERATURE)
    state = dataclasses.replace(state, position=np.int32(position))
    run.state, metrics = run.learner.grpo_step(state, run.pack(samples))
    numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
    rewards = np.array([sample.reward for sample in samples])
    numbers |= {"reward": rewards.mean(), "accuracy": (rewards == 1).mean()}
    tokens = sum(len(sample.tokens) for sample in samples)
    return numbers | {"tokens_per_second": tokens / (time.perf_counter() - began)}


def train(run: Run, args: argparse.Namespace) -> tuple[float, float]:
    """The whole run from the state it is in; returns the held-out accuracies after SFT and at the end."""
    if run.accuracy_after_sft is None:
        supervised(run, args)
    report = Report(args.out, args.steps, int(run.state.step))
    for step in range(int(run.state.step) + 1, args.steps + 1):
        report.add(step, grpo_step(run, args))
        if step % args.checkpoint_every == 0 or step == args.steps:
            run.checkpoints.save(run.state, {"accuracy_after_sft": run.accuracy_after_sft})
    report.close()
    if report.records:
        gap = report.records[-1]["mismatch_log_prob_abs_diff"]
        print(f"log-probs of sampler and trainer in the last step: {gap:.1e} apart on average")
    assert run.accuracy_after_sft is not None
    return run.accuracy_after_sft, run.rollouts.held_out_accuracy(run.state.params)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with contextlib.suppress(RuntimeError):  # devices exist already: those it will be
        jax.config.update("jax_num_cpu_devices", EMULATED_DEVICES)
    try:
        run = set_up(args)
    except ValueError as error:
        print(f"train_grpo.py: error: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    before, after = train(run, args)
    print(f"held-out accuracy: {before:.1%} after SFT, {after:.1%} after GRPO ({after - before:+.1%})")
    print(f"{time.perf_counter() - began:.0f} s; metrics.jsonl, reward.png and checkpoints in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

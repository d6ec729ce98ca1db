"""A run of train_grpo.py, from its arguments to its last line: set up, supervised steps, GRPO
steps, checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tqdm import tqdm

from examples.trainer import processes
from examples.trainer.arguments import NEWEST, TRY_AGAIN
from examples.trainer.checkpoint import NOTES, Checkpoints, steps_in
from examples.trainer.explained import Chosen, records
from examples.trainer.learner import Learner, TrainState
from examples.trainer.model import Config, ModelConfig, create_model
from examples.trainer.preemption import signals
from examples.trainer.report import Report, memory_gib, settings_of
from examples.trainer.rollouts import Packer, Rollouts, answers, readable, scores
from examples.trainer.sampler import make_sampler
from examples.trainer.spikes import Spikes
from examples.trainer.tasks import Task
from jaxppo import KL, ParallelMesh, PolicyLossConfig, Sample, make_parallel_mesh, policy_losses
from jaxppo.sharding import multihost

CHECKED = 32  # the positions that the check of packing needs on eight context shards
TEMPERATURE = 1.0  # of sampling; at 1 the trainer need not divide its logits by it


@dataclasses.dataclass
class Run:
    """The parts of a run, made when its arguments are known to be good."""

    task: Task
    rollouts: Rollouts
    pack: Packer
    learner: Learner
    checkpoints: Checkpoints
    state: TrainState
    spikes: Spikes
    asked: list[str] = dataclasses.field(default_factory=list)
    """Signals that asked this process to stop; of any process, once all know of it."""
    accuracy_after_sft: float | None = None
    sft_done: int = 0
    step: int = 0
    """As `state.step`, for which the host need not ask the device."""
    position: int = 0
    """The next question in the task's stream."""
    skipped_in_a_row: int = 0
    sampled: Sequence[Sample] = ()
    """This process's samples of the last step."""
    explained: Chosen | None = None
    """What the loss did with some of that step's samples."""

    def stops(self) -> bool:
        """Whether a process of the run was asked to stop: all stop after the same step."""
        # a signal that comes at this moment is seen after the next step
        mine = self.asked[0] if self.asked else ""
        told = max(multihost.exchange("a wish to stop", mine.encode())).decode()
        self.asked[:] = [told] if told else []
        return bool(told)

    def save(self) -> None:
        """Saves all that is needed to go on from here, unless this step is saved already."""
        saved = dataclasses.replace(self.state, frozen=None)
        self.checkpoints.save(saved, self.step, {name: getattr(self, name) for name in NOTES})

    def load(self, step: int | None) -> None:
        """Goes back to a checkpoint, the newest for None; raises ValueError if there is no good
        one.
        """
        frozen = self.state.frozen
        learned, self.step, notes = self.checkpoints.load(
            dataclasses.replace(self.state, frozen=None), step
        )
        self.state = dataclasses.replace(learned, frozen=frozen)
        for name in NOTES:
            setattr(self, name, notes[name])


def set_up(args: argparse.Namespace, devices: Sequence[jax.Device] | None = None) -> Run:
    """Everything up to the first step, a checkpoint loaded if `--resume` asks for it; raises on
    any bad argument.
    """
    resume = args.resume
    anew = args.overwrite
    if args.restartable:  # all processes see the same, since none has saved a checkpoint yet
        resume = NEWEST if steps_in(args.out / "checkpoints") else None
        anew = resume is None
    if resume is None and not anew:
        _check_no_run(args.out)
    if devices is None:
        devices = _devices(args)
    loss = _loss(args)
    batch_size = args.prompts * args.samples
    task, config, parallel, graphdef, params = (_load if args.model else _create)(args, devices)
    graphdef, params, frozen = _learning(args, config, parallel, graphdef, params)
    lengths = task.prompt_length, task.response_length
    sampler = make_sampler(graphdef, config, parallel, *lengths, task.tokenizer.ends, task.common)
    optimizer = _optimizer(args.learning_rate)
    learner = Learner(
        graphdef, config, parallel, loss, optimizer, args.updates, min(args.explain, batch_size)
    )
    identity = _identity(args, config, frozen)
    rollouts = Rollouts(task, sampler, parallel, batch_size)
    if anew:
        _clear(args.out)
    checkpoints = Checkpoints(args.out / "checkpoints", identity)
    pack = Packer(parallel, batch_size, task, args.samples if args.share_prefixes else None)
    spikes = Spikes(args.out / "spikes", args.spike_deviations)
    run = Run(
        task, rollouts, pack, learner, checkpoints, learner.start(params, args.seed, frozen), spikes
    )
    if resume is not None:
        run.load(None if resume == NEWEST else resume)
    return run


@functools.cache
def _optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Made once for each rate, so that learners of one process can be equal."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.95))


def _identity(args: argparse.Namespace, config: Config, frozen: nnx.State | None) -> dict[str, Any]:
    """What a checkpoint must have been saved with, so that this run may go on from it."""
    # with fewer questions held out, the run would go on to train on some of them
    identity = {
        "task": args.task,
        "shots": args.shots,
        "seed": args.seed,
        "held_out": args.held_out,
    }
    identity |= {
        "train_layers": args.train_layers,
        "reference": args.kl_coef > 0,
        **dataclasses.asdict(config),
    }
    identity |= {name: getattr(args, name) for name in ("lora_rank", "lora_alpha", "lora_targets")}
    if frozen is not None:
        identity["frozen"] = fingerprint(frozen)
    return identity


def _devices(args: argparse.Namespace) -> Sequence[jax.Device]:
    found = jax.devices()
    if args.devices is None:
        return found
    if args.devices > len(found):
        raise ValueError(
            f"--devices: got {args.devices}, expected at most the {len(found)} that there are"
        )
    return found[: args.devices]


def _loss(args: argparse.Namespace) -> PolicyLossConfig:
    clip = {"clip_high": 0.28} if args.loss == "ppo" else {}
    return PolicyLossConfig(
        policy_losses.by_name(args.loss, **clip),
        ratio_to=args.ratio_to,
        kl=KL(args.kl_coef) if args.kl_coef else None,
        entropy_coef=args.entropy_coef,
        clip_by_sign=True,
    )


def _mesh(args: argparse.Namespace, devices: Sequence[jax.Device], heads: int) -> ParallelMesh:
    """The mesh that was asked for, or one for so many devices and key-value heads."""
    mesh = args.mesh
    if not mesh and len(devices) == 8 and heads % 2 == 0:
        mesh = "dp=2,cp=2,tp=2"
    elif not mesh:
        mesh = f"dp={len(devices)},cp=1,tp=1"
    return make_parallel_mesh(mesh, context_layout=args.context_layout, devices=devices)


def _learning(
    args: argparse.Namespace,
    config: Config,
    parallel: ParallelMesh,
    graphdef: nnx.GraphDef,
    params: nnx.State,
) -> tuple[nnx.GraphDef, nnx.State, nnx.State | None]:
    """The model's structure, the parameters that learn, and the others, None for none."""
    layers = args.train_layers
    if layers is None:
        layers = config.layers
    if layers > config.layers:
        raise ValueError(
            f"--train-layers: got {layers}, expected at most the {config.layers} layers of the"
            " model"
        )
    if args.lora_rank is not None:
        return _adapted(args, config, parallel, graphdef, params, layers)
    if args.train_layers is None:
        return graphdef, params, None

    def learns(path: tuple[Any, ...], _: Any) -> bool:
        return path[0] == "norm" or (
            path[0] in ("layers", "blocks") and int(path[1]) >= config.layers - layers
        )

    return nnx.split(nnx.merge(graphdef, params), learns, ...)


def _adapted(
    args: argparse.Namespace,
    config: Config,
    parallel: ParallelMesh,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    layers: int,
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The structure with adapters in the last layers, the adapters, which learn, and the
    parameters of the model.
    """
    # with the model of a folder, see _load
    from examples.trainer.lora import LoraConfig, add_adapters

    lora = LoraConfig(args.lora_rank, args.lora_alpha, tuple(args.lora_targets), layers)
    return *add_adapters(graphdef, params, config, lora, parallel, args.seed), params


def fingerprint(params: nnx.State) -> int:
    """A sum over the bits of all parameters, the same on every mesh."""
    return int(_sum_of_bits(params))


@jax.jit
def _sum_of_bits(params: nnx.State) -> jax.Array:
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint32).sum() for x in jax.tree.leaves(params)]
    return jnp.stack(bits).sum()


def _check_no_run(folder: Path) -> None:
    """Raises if the folder holds an older run, which would be overwritten."""
    steps = steps_in(folder / "checkpoints")
    if steps or (folder / "metrics.jsonl").exists():
        found = f"checkpoints {', '.join(map(str, steps))}" if steps else "no checkpoint yet"
        raise ValueError(
            f"--out: got {folder}, where a run is ({found}), expected --resume, to go on from it,"
            " or --overwrite, to delete it"
        )


def _clear(folder: Path) -> None:
    """Deletes an older run's files, but for those that every run replaces."""
    if processes.is_first():
        for name in ("checkpoints", "spikes"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
            (folder / name).unlink(missing_ok=True)
    multihost.exchange("an emptied folder", b"")


_Model = tuple[Task, Config, ParallelMesh, nnx.GraphDef, nnx.State]


def _create(args: argparse.Namespace, devices: Sequence[jax.Device]) -> _Model:
    """The toy decoder, with the tokenizer of its task."""
    task = Task(args.task, args.seed, args.held_out, response_length=args.response_length)
    longest = task.prompt_length + task.response_length
    sizes = {"width": args.width, "layers": args.layers, **_numerics(args, longest)}
    config = ModelConfig(task.tokenizer.size, max(longest, CHECKED), **sizes)
    parallel = _mesh(args, devices, config.kv_heads)
    return task, config, parallel, *create_model(config, parallel, args.seed)


def _load(args: argparse.Namespace, devices: Sequence[jax.Device]) -> _Model:
    """The model of a folder, with its tokenizer."""
    # imported here, since nothing else needs them
    from examples.trainer.model_folder import FolderTokenizer
    from examples.trainer.published import load_model, read_config

    config = read_config(args.model)
    tokenizer = FolderTokenizer(args.model, config.ends)
    task = Task(args.task, args.seed, args.held_out, tokenizer, args.shots, args.response_length)
    longest = task.prompt_length + task.response_length
    config = dataclasses.replace(
        config.with_tokens(tokenizer.size, longest), **_numerics(args, longest)
    )
    parallel = _mesh(args, devices, config.kv_heads)
    return task, config, parallel, *load_model(args.model, config, parallel)


def _numerics(args: argparse.Namespace, longest: int) -> dict[str, Any]:
    """The fields of a config that say how sampler and trainer round, for sequences of at most so
    many tokens.
    """
    fields: dict[str, Any] = {"logits_dtype": args.logits_dtype}
    if args.same_bits:
        fields["slots"] = max(longest, CHECKED)
    return fields


def supervised(run: Run, args: argparse.Namespace) -> None:
    """A short imitation of right answers, and the accuracy that GRPO starts from."""
    skipped = []
    steps = range(run.sft_done, args.sft_steps)
    shown: Any = {
        "initial": run.sft_done,
        "total": args.sft_steps,
        "disable": not processes.is_first(),
    }
    for _ in tqdm(steps, desc="sft", unit="step", dynamic_ncols=True, **shown):
        if run.stops():
            return
        questions, run.position = run.task.take(run.position, run.rollouts.batch_size)
        # nothing here waits for the step before: the host packs this batch while devices run that
        # step
        run.state, metrics = run.learner.sft_step(
            run.state, run.pack(run.rollouts.own(answers(questions)))
        )
        skipped.append(metrics["skipped"])
        run.sft_done += 1
    if skipped and (lost := int(sum(jax.device_get(skipped)))):
        print(f"supervised steps skipped, loss or gradient not finite: {lost} of {len(skipped)}")
    if args.sft_steps:
        run.state = run.learner.start(run.state.params, args.seed, run.state.frozen)
    run.accuracy_after_sft = run.rollouts.held_out_accuracy(run.state.variables)
    print(f"held-out accuracy {_before(args)}: {run.accuracy_after_sft:.1%} of {args.held_out}")


def _before(args: argparse.Namespace) -> str:
    return "after SFT" if args.sft_steps else "before GRPO"


def grpo_step(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Samples, scores, packs and learns once; returns the numbers to report.

    Each transfer between host and device is explicit: prompts, responses, the packed batch, the
    metrics.
    """
    began = time.perf_counter()
    questions, run.position = run.task.take(run.position, args.prompts)
    with jax.transfer_guard("disallow"):
        key = run.learner.sampling_key(run.state)
        samples = run.rollouts.sample(
            run.state.variables, questions, args.samples, key, TEMPERATURE
        )
        batch = run.pack(samples)
        run.state, metrics, run.explained = run.learner.grpo_step(run.state, batch)
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
    run.step += 1
    run.sampled = samples
    if path := run.spikes.look(run.step, numbers["loss"], batch):
        tqdm.write(
            f"step {run.step}: loss {numbers['loss']:.3g} stands out; its batch is in {path}"
        )
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if numbers["skipped"] else 0
    rewards, tokens = scores(samples)
    numbers |= {"reward": rewards.mean(), "accuracy": (rewards == 1).mean()}
    return numbers | {
        "tokens_per_second": tokens.sum() / (time.perf_counter() - began),
        "memory_gib": memory_gib(),
    }


def train(run: Run, args: argparse.Namespace) -> None:
    """The whole run from the state it is in, or as much of it as there is time for.

    Raises:
      FloatingPointError: `--max-skipped` steps in a row had a loss or a gradient that was not
        finite.
      OSError: a file could not be written.
    """
    if run.accuracy_after_sft is None:
        supervised(run, args)
        run.save()
        run.checkpoints.wait()  # so that a run with metrics has a checkpoint to go on from
    settings = settings_of(run.learner.parallel, vars(args), run.learner.model)
    first = processes.is_first()
    explains = args.explain > 0
    with (
        Report(args.out, args.steps, run.step, settings, explains) if first else processes.Silent()
    ) as report:
        while run.step < args.steps and not run.stops():
            numbers = grpo_step(run, args)
            if run.step % args.evaluate_every == 0:
                numbers["held_out_accuracy"] = run.rollouts.held_out_accuracy(run.state.variables)
            explained = records(run.explained, run.step, run.task.tokenizer)
            report.add(run.step, numbers, readable(run.sampled, run.task.tokenizer), explained)
            if run.skipped_in_a_row == args.max_skipped:
                run.checkpoints.wait()  # the process ends now
                raise FloatingPointError(
                    f"step {run.step}: loss or gradient not finite in {args.max_skipped} steps in a"
                    " row, expected fewer"
                )
            if run.step % args.checkpoint_every == 0:
                run.save()
        run.save()
    run.checkpoints.wait()
    report.draw()
    last = report.records[-1] if report.records else {}
    gap = last.get("mismatch_log_prob_abs_diff", last.get("sampler_log_prob_abs_diff"))
    if gap is not None:
        print(f"log-probs of sampler and trainer in the last step: {gap:.1e} apart on average")


def one_process(args: argparse.Namespace) -> int:
    """This process's part of a run; returns its exit code."""
    with signals() as asked:
        try:
            with processes.alone_in(args.out):
                return _begin_to_end(args, asked)
        except ValueError as error:  # all processes raise this and the next
            return _failed(2, error)
        except (FloatingPointError, OSError) as error:
            return _failed(1, error)
        except RuntimeError:
            if jax.process_count() == 1:
                raise
            traceback.print_exc()  # mostly since another process is gone
            return 1


def _begin_to_end(args: argparse.Namespace, asked: list[str]) -> int:
    if jax.config.jax_compilation_cache_dir is None:  # so that a resumed run need not compile again
        jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "programs"))
    began = time.perf_counter()
    run = set_up(args)
    run.asked = asked
    if run.accuracy_after_sft is None:  # a run that goes on has passed it
        run.learner.check_packing(run.state.variables)
    train(run, args)
    if asked and run.step < args.steps:
        print(
            f"stopped by {asked[0]} after step {run.step} of {args.steps} and saved; --resume"
            " goes on"
        )
        return TRY_AGAIN if args.restartable else 0
    before = run.accuracy_after_sft
    after = run.rollouts.held_out_accuracy(run.state.variables)
    assert before is not None
    print(
        f"held-out accuracy: {before:.1%} {_before(args)}, {after:.1%} after GRPO"
        f" ({after - before:+.1%})"
    )
    print(
        f"{time.perf_counter() - began:.0f} s; metrics.jsonl, reward.png and checkpoints in"
        f" {args.out}"
    )
    return 0


def _failed(code: int, error: object) -> int:
    print(f"train_grpo.py: error: {error}", file=sys.stderr)
    return code

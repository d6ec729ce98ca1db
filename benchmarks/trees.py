"""The savings of rows packed as trees: tokens, and floating-point operations of a model's forward
and backward.

    python -m benchmarks.trees
    python -m benchmarks.trees --parts responses

The first table is of shared prompts, the second of shared responses. Operations are counted by
`jaxppo.sharding.audit` in the program of the example's decoder, for one device; nothing runs. They
leave the head out: its work follows the tokens with loss, of which rows with shared prompts have as
many.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from flax import nnx

from examples.trainer.attention import context_attention
from examples.trainer.model import ModelConfig, create_model
from jaxppo import RolloutBatch, Sample, make_parallel_mesh
from jaxppo.batch.token_trees import TokenTrees
from jaxppo.sharding import audit

MODEL = ModelConfig(
    vocab_size=32768, max_length=8192, width=1024, layers=4, heads=8, head_dim=128, mlp_width=4096
)


@dataclasses.dataclass(frozen=True)
class Step:
    """`prompts` groups of `copies` samples; each has a prompt and a response of these numbers of
    tokens.
    """

    prompt: int
    response: int
    copies: int
    prompts: int

    def samples(self) -> list[Sample]:
        """Samples whose prompts have nothing in common with those of other groups."""
        rng = np.random.default_rng(0)
        samples = []
        for group in range(self.prompts):
            prompt = [group, *rng.integers(0, MODEL.vocab_size, self.prompt - 1)]
            for _ in range(self.copies):
                tokens = [*prompt, *rng.integers(0, MODEL.vocab_size, self.response)]
                samples.append(Sample(tokens, response_start=self.prompt, group_id=group))
        return samples


@dataclasses.dataclass(frozen=True)
class Search:
    """Responses that branch: a prompt and each part of a response end in `branches` parts,
    `levels` parts deep.
    """

    prompt: int
    part: int
    branches: int
    levels: int

    def samples(self) -> list[Sample]:
        """A sample for each leaf. No token stands twice but where samples share it."""
        new = itertools.count()

        def grown(tokens: list[int], levels: int) -> Iterator[list[int]]:
            if levels == 0:
                yield tokens
                return
            for _ in range(self.branches):
                yield from grown([*tokens, *itertools.islice(new, self.part)], levels - 1)

        prompt = [*itertools.islice(new, self.prompt)]
        return [Sample(tokens, response_start=self.prompt) for tokens in grown(prompt, self.levels)]

    def __str__(self) -> str:
        return (
            f"search: prompt {self.prompt}, {self.branches} branches after each {self.part},"
            f" {self.levels} levels"
        )


@dataclasses.dataclass(frozen=True)
class Turns:
    """An agent's trajectory: each turn is a sample, whose prompt holds the turns before and what
    tools wrote since.
    """

    prompt: int
    response: int
    tool: int
    turns: int

    def samples(self) -> list[Sample]:
        """A sample for each turn."""
        before = [*range(self.prompt)]
        samples = []
        for _ in range(self.turns):
            whole = [*range(len(before) + self.response)]
            samples.append(Sample(whole, response_start=len(before)))
            before = [*range(len(whole) + self.tool)]
        return samples

    def __str__(self) -> str:
        return (
            f"{self.turns} turns: prompt {self.prompt}, then {self.response} sampled and"
            f" {self.tool} of tools"
        )


def responses_row(step: Search | Turns, row_length: int) -> str:
    """One row of the second table: what is stored of a step that is packed whole, with prompts
    shared, and as trees.
    """
    samples = step.samples()
    whole = RolloutBatch.from_samples(samples, row_length=row_length)
    prompts = RolloutBatch.from_samples(samples, row_length=row_length, share_prefixes=True)
    trees = TokenTrees.from_samples(samples, row_length=row_length)
    tokens = [int((batch.segment_ids > 0).sum()) for batch in (whole, prompts, trees.rows)]
    in_head = [int(batch.loss_mask.sum()) for batch in (whole, trees.rows)]
    cells = [
        str(step),
        f"{len(samples)}",
        *(f"{n:,}" for n in tokens),
        f"{1 - tokens[2] / tokens[0]:.0%}",
    ]
    return "| " + " | ".join([*cells, *(f"{n:,}" for n in in_head)]) + " |"


def operations(batch: RolloutBatch, config: ModelConfig) -> float:
    """The floating-point operations of a batch's hidden states and their gradient."""
    parallel = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    graphdef, params = create_model(config, parallel, seed=0)

    def total(params: nnx.State, batch: RolloutBatch) -> jax.Array:
        model = nnx.merge(graphdef, params)
        hidden: jax.Array = model(
            batch.tokens, batch.positions, context_attention(batch.paths, parallel)
        )
        return hidden.sum()

    return audit(jax.grad(total), params, batch.put(parallel)).flops.high


def row(step: Step, row_length: int, config: ModelConfig) -> str:
    """One row of the table."""
    samples = step.samples()
    whole, trees = (
        RolloutBatch.from_samples(samples, row_length=row_length, share_prefixes=x)
        for x in (False, True)
    )
    tokens = [int((batch.segment_ids > 0).sum()) for batch in (whole, trees)]
    flops = [operations(batch, config) / 1e12 for batch in (whole, trees)]
    rows = [batch.tokens.shape[0] for batch in (whole, trees)]
    cells = [f"{step.prompt}:{step.response}", f"{step.copies}", *(f"{n:,}" for n in tokens)]
    cells += [f"{1 - tokens[1] / tokens[0]:.0%}", *map(str, rows), *(f"{n:.1f}" for n in flops)]
    return "| " + " | ".join([*cells, f"{1 - flops[1] / flops[0]:.0%}"]) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    about = "Tokens and operations of samples packed whole and as trees."
    add = (
        parser := argparse.ArgumentParser(prog="benchmarks.trees", description=about)
    ).add_argument
    add("--parts", nargs="+", choices=("prompts", "responses"), default=("prompts", "responses"))
    add("--tokens", type=int, default=1000, help="of a sample")
    add("--prompts", type=int, default=16, help="of a step")
    add("--row-length", type=int, default=9216, help="T")
    add("--layers", type=int, default=MODEL.layers)
    args = parser.parse_args(argv)
    if "prompts" in args.parts:
        prompts_table(args)
    if "responses" in args.parts:
        responses_table()
    return 0


def prompts_table(args: argparse.Namespace) -> None:
    """Prints the table of shared prompts."""
    config = dataclasses.replace(MODEL, layers=args.layers)
    counts = "tokens | as trees | saved | rows | as trees | TFLOP | as trees | saved"
    print(f"| prompt:response | samples per prompt | {counts} |")
    print("|" + "---|" * 10)
    for share in (4, 1):
        response = args.tokens // (share + 1)
        for copies in (8, 16):
            print(
                row(
                    Step(args.tokens - response, response, copies, args.prompts),
                    args.row_length,
                    config,
                ),
                flush=True,
            )


def responses_table() -> None:
    """Prints the table of shared responses, for rows that hold each tree whole."""
    print(
        "| step | samples | tokens | prompts shared | responses too | saved | in the head |"
        " responses shared |"
    )
    print("|" + "---|" * 8)
    for step in (
        Search(400, 200, 2, 4),
        Search(400, 200, 4, 2),
        Turns(500, 100, 200, 8),
        Turns(1000, 300, 700, 20),
    ):
        print(responses_row(step, 32768))


if __name__ == "__main__":
    raise SystemExit(main())

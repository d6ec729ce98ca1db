"""Checks the arguments of a call to two heads that see the same tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxppo.head.head import Head, as_head
from jaxppo.head.prepare import HeadOptions, prepare_head
from jaxppo.head.types import Prepared
from jaxppo.sharding import ParallelMesh, ShardAxes


def prepare_pair(
    first: tuple[Any, Any],
    second: tuple[Any, Any],
    *,
    names: tuple[str, str],
    second_spec: P | None,
    parallel: ParallelMesh | ShardAxes | None,
    temperature: Any,
    where: Any,
    options: HeadOptions,
) -> tuple[Prepared, Prepared]:
    """Prepares both calls and checks that their tokens, columns and shards agree.

    Args:
      first: hidden states and head, the arguments `hidden` and `head`.
      second: the arguments `teacher_hidden` and `teacher_head` where the second name is "teacher".
      names: the names of the two models, for errors.
      second_spec: how the second hidden states are sharded, see `HeadOptions.hidden_spec`.
      parallel: this and the remaining arguments are used in both calls, see `log_probs_from_hidden`.
    """
    prepare = partial(
        prepare_head, targets=None, parallel=parallel, entropy="none", temperature=temperature, where=where, heads=2
    )
    of_second: HeadOptions = {**options, "hidden_spec": second_spec}
    name = f"{names[1]}_head"
    pair = prepare(*first, options=options), prepare(*second, name=name, options=of_second)
    _check(names, (as_head("head", first[1]), as_head(name, second[1])), pair)
    return pair


def _check(names: tuple[str, str], heads: tuple[Head, Head], pair: tuple[Prepared, Prepared]) -> None:
    """Raises if the tokens or the vocabularies of the two calls differ."""
    (one, other), expected = pair, f"expected the {names[0]}'s"
    if one.tokens != other.tokens:
        raise ValueError(f"{names[1]}_hidden: got [R, T] = {other.tokens}, {expected}, {one.tokens}")
    columns = [head.kernel.shape[head.v_dim] for head in heads]
    if columns[0] != columns[1]:
        raise ValueError(f"{names[1]}_head.kernel: got {columns[1]} columns, {expected} {columns[0]}")
    if (heads[0].vocab_size or columns[0]) != (heads[1].vocab_size or columns[1]):
        got, there = heads[1].vocab_size, heads[0].vocab_size
        raise ValueError(f"{names[1]}_head.vocab_size: got {got}, {expected}, {there}")
    if one.call.v_names != other.call.v_names:
        raise ValueError(
            f"{names[1]}_head.kernel: got its vocabulary over {other.call.v_names}, expected over {one.call.v_names}, "
            f"as the {names[0]}'s"
        )

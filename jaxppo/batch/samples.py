"""Samples (prompts with responses) on the host, and their packing into the arrays of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import DTypeLike

from jaxppo.base.arrays import (
    INTEGERS,
    LOG_PROBS,
    PER_TOKEN_VALUES,
    check,
    check_array,
    is_nan,
    is_number,
)
from jaxppo.batch.extras import PREFIX, Extra, as_extras, as_values, check_fill, common_dtype
from jaxppo.batch.host import (
    MAX_ID,
    as_array,
    as_unmixed,
    check_within,
    holds,
    in_f32,
    is_whole,
    not_numbers,
    scalar,
    shown,
)
from jaxppo.batch.token_sets import TokenSets
from jaxppo.sharding import Packed, ParallelMesh, multihost

if TYPE_CHECKING:
    from jaxppo.batch.engines import Truncated

# a single number counts for every token
OF_WHOLE_RESPONSES = ("advantages", "loss_weights", "policy_versions")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt and response, on the host.

    The response is `tokens[response_start:]`. Per-token arrays have one value for each response
    token, and are None if the run has no such values. Packing moves each value to the position that
    predicts its token.

    Args:
      tokens: `i32[n]`, the prompt and the response, without padding, which would count as tokens.
      response_start: the first response token, from 1, since nothing predicts token 0, to n for an
        empty response. By default the first token with loss_mask 1.
      loss_mask: `[n]`, 1 for the tokens to train on, 0 elsewhere, such as what a tool wrote; by
        default the response.
      reward: one number for the whole response. Without one, None or NaN, the sample is in no
        group's statistics and has no advantage; a batch has rewards unless all its samples have
        None.
      sample_id: the unique number of the sample in the step; by default its index among the
        samples.
      group_id: equal for the samples of one prompt; estimators that compare samples, like
        `advantages.grpo`, need it.
      rollout_id: equal for all parts of one trajectory; by default each sample is a trajectory of
        its own.
      advantages: `[n - response_start]`, like old_log_probs, ref_log_probs, rollout_log_probs,
        values, returns and policy_versions; what they mean: see `RolloutBatch`. Of advantages and
        policy_versions, a single number is that of the whole response.
      nucleus: the ids that the sampler could draw at each response token, ragged, for
        `pack_nucleus_ids`.
      loss_weights: factors of each token's whole loss, at least 0; a single number for the whole
        response.
      extras: arrays of your own by name, see `jaxppo.batch.extras.Extra`.

    Raises:
      TypeError, ValueError: ids that are not integers, values that are no numbers or not one for
        each response token, numbers that i32 or f32 does not hold, neither response_start nor
        loss_mask.

    Example:
      >>> Sample([5, 6, 7, 8], response_start=2, reward=1.0).mask.tolist()
      [0.0, 0.0, 1.0, 1.0]
    """

    tokens: Sequence[int] | Int[np.ndarray, " n"]
    response_start: int | None = None
    loss_mask: Sequence[float] | Float[np.ndarray, " n"] | None = None
    reward: float | None = None
    sample_id: int | None = None
    group_id: int | None = None
    rollout_id: int | None = None
    advantages: Sequence[float] | Float[np.ndarray, " m"] | float | None = None
    old_log_probs: Sequence[float] | Float[np.ndarray, " m"] | None = None
    ref_log_probs: Sequence[float] | Float[np.ndarray, " m"] | None = None
    rollout_log_probs: Sequence[float] | Float[np.ndarray, " m"] | None = None
    values: Sequence[float] | Float[np.ndarray, " m"] | None = None
    returns: Sequence[float] | Float[np.ndarray, " m"] | None = None
    nucleus: TokenSets | Sequence[Sequence[int]] | None = None
    policy_versions: Sequence[int] | Int[np.ndarray, " m"] | int | None = None
    loss_weights: Sequence[float] | Float[np.ndarray, " m"] | float | None = None
    extras: Mapping[str, Any] | None = None

    @classmethod
    def from_vllm(
        cls,
        output: Any,
        *,
        choice: int | None = None,
        loss_mask: Sequence[float] | None = None,
        truncated: Truncated = "train",
        **fields: Any,
    ) -> Sample:
        """The sample of one vLLM output, or of the outputs of several turns.

        The prompt of a later turn continues the tokens of the turns before; the tokens that it
        adds, such as a tool's answer, are not trained on. Log-probs are vLLM's `logprobs` and the
        nucleus its `sampling_mask`, if asked for.

        Args:
          output: a `RequestOutput`, or a dictionary as below; or an endpoint's answer with
            return_token_ids=True:
            {"choices": [...]}. A list of them for several turns.
          choice: the index of the completion, if a request had several.
          loss_mask: 0 or 1 for each token after the first prompt; 0 excludes more tokens from
            training.
          truncated: "train" on a sample that was cut at its length limit, or "mask" it, and aborted
            ones too.
          **fields: the sample's other fields, such as reward and group_id, but none that the output
            has. If the last turn was aborted or is not finished, the reward becomes NaN: none.
            policy_versions may be one a turn.

        Raises:
          TypeError, ValueError: a missing entry, ids that are not integers, a turn whose prompt
            does not begin with the turns before, log-probs for only some turns or tokens, a
            log-prob that is no number, or above 0 by more than bf16 rounds (0.125), a sampling mask
            without the sampled token, a last turn that was aborted or is not finished, a field that
            the output has.

        Example:
          >>> sampled = {"index": 0, "token_ids": [7, 8], "logprobs": [{7: -0.5}, {8: -1.5}], "finish_reason": "stop"}
          >>> sample = Sample.from_vllm({"prompt_token_ids": [5, 6], "outputs": [sampled]}, reward=1.0)
          >>> sample.tokens, sample.mask.tolist(), sample.rollout_log_probs
          ([5, 6, 7, 8], [0.0, 0.0, 1.0, 1.0], [-0.5, -1.5])
        """
        from jaxppo.batch.engines import sample_fields, vllm_turn

        return cls(
            **sample_fields(output, partial(vllm_turn, choice=choice), loss_mask, truncated, fields)
        )

    @classmethod
    def from_sglang(
        cls,
        output: Any,
        *,
        loss_mask: Sequence[float] | None = None,
        truncated: Truncated = "train",
        **fields: Any,
    ) -> Sample:
        """The sample of one SGLang output, or of the outputs of several turns, as `from_vllm`.

        Args:
          output: the result of /generate or `Engine.generate`, {"meta_info", "output_ids"}, and
            beside it the request's "input_ids", which SGLang does not return. Log-probs are
            `output_token_logprobs`. Where the request had `return_sampling_mask`, the nucleus is
            `output_token_sampling_mask`, and log-probs are those within it,
            `output_token_sampling_logprobs`. A nucleus may also come as top_p_token_ids and
            top_p_token_offsets, which slime's engine returns. A list for several turns.
            `weight_versions`, the spans of output tokens that each version of the weights drew,
            become policy_versions if the versions are numbers, and you give none.
          loss_mask: see `from_vllm`, also for the other arguments and for errors.

        Example:
          >>> meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [(-0.5, 7, None)]}
          >>> Sample.from_sglang({"input_ids": [5, 6], "meta_info": meta}).tokens
          [5, 6, 7]
        """
        from jaxppo.batch.engines import sample_fields, sglang_turn

        return cls(**sample_fields(output, sglang_turn, loss_mask, truncated, fields))

    def __post_init__(self) -> None:
        # what JAX returns has no dimensions, but is no number
        for name in (*_ONE_NUMBER, *OF_WHOLE_RESPONSES):
            object.__setattr__(self, name, scalar(getattr(self, name)))
        length = as_tokens("tokens", self.tokens).size
        self._check_mask(length)
        count = length - self.start
        for name in ("sample_id", "group_id", "rollout_id"):
            number = getattr(self, name)
            if number is not None:
                _check_id(name, number)
        _check_reward(self.reward)
        for name in PER_TOKEN_VALUES:
            values = getattr(self, name)
            if name in OF_WHOLE_RESPONSES and is_number(values):
                values = np.full(count, values)
                object.__setattr__(self, name, values)
            if values is not None:
                _check_values(name, values, count)
        if self.extras is not None:
            extras = as_extras(self.extras)
            for name, extra in extras.items():
                extras[name] = _with_values(name, extra, length if extra.at == "input" else count)
            object.__setattr__(self, "extras", extras)
        if self.nucleus is not None:
            if not isinstance(self.nucleus, TokenSets | Sequence):
                got = type(self.nucleus).__name__
                raise TypeError(f"nucleus: got {got}, expected a list of ids for each token")
            sets = len(self.nucleus)
            check("nucleus", f"{sets} sets of ids", sets == count, f"{count}, one a response token")

    @property
    def mask(self) -> Float[np.ndarray, " n"]:
        """loss_mask of every token."""
        if self.loss_mask is not None:
            return np.asarray(self.loss_mask, np.float32)
        if self.response_start is None:
            raise ValueError("response_start, loss_mask: got None for both, expected one of them")
        return (np.arange(len(self.tokens)) >= self.response_start).astype(np.float32)

    @property
    def start(self) -> int:
        """The first response token."""
        if self.response_start is not None:
            return self.response_start
        trained = self.mask > 0
        if not trained.any():
            return len(self.tokens)
        return int(np.argmax(trained))

    def _check_mask(self, length: int) -> None:
        if self.loss_mask is not None:
            mask = as_array("loss_mask", self.loss_mask, _ONE_EACH)
            check(
                "loss_mask",
                f"shape {mask.shape}",
                mask.shape == (length,),
                f"{(length,)} like tokens",
            )
            if mask.dtype.kind not in "bifu" or not np.isin(mask, (0, 1)).all():
                raise ValueError(f"loss_mask: got {shown(self.loss_mask)}, expected 0 and 1")
        start = self.start
        good = is_whole(start) and min(1, length) <= start <= length
        check("response_start", shown(start), good, f"1 to {length}, the number of tokens")
        early = np.flatnonzero(self.mask[:start])
        check(
            "loss_mask",
            f"1 at token {early.min(initial=start)}",
            early.size == 0,
            f"0 before {start}",
        )


_ONE_NUMBER = ("response_start", "reward", "sample_id", "group_id", "rollout_id")
_ONE_EACH = "one number for each token"


def as_tokens(name: str, tokens: object) -> Int[np.ndarray, " n"]:
    """The token ids as an array; raises unless they are integers that fit i32.

    `name` stands in errors.
    """
    array = as_unmixed(name, tokens, _ONE_EACH)
    check(name, f"shape {array.shape}", array.ndim == 1, "[n]")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {array.dtype} {shown(tokens)}, expected integers")
    if array.size and (array.min() < 0 or array.max() > MAX_ID):
        raise ValueError(f"{name}: got {array.min()} to {array.max()}, expected 0 to {MAX_ID}")
    return array


def _with_values(name: str, extra: Extra, count: int) -> Extra:
    """The extra with checked values, one for each of so many tokens."""
    what = f"extras[{name!r}]"
    values = as_values(what, extra.values, count)
    check_fill(f"{what}.fill", extra.fill, values.dtype)
    return dataclasses.replace(extra, values=values)


def _check_id(name: str, value: Any) -> None:
    expected = f"0 to {MAX_ID}; number the ids of a step"
    if not is_whole(value):
        raise TypeError(f"{name}: got {shown(value)}, expected an integer from {expected}")
    check(name, value, 0 <= value <= MAX_ID, expected)


def _check_reward(reward: Any) -> None:
    if reward is None or is_nan(reward):
        return
    if not is_number(reward):
        raise TypeError(
            f"reward: got {shown(reward)}, expected one finite number for the whole response, or"
            " None or NaN"
        )
    check("reward", reward, holds(np.float32, reward), "a number that f32 holds")


def _check_values(name: str, values: object, length: int) -> None:
    array = as_unmixed(name, values, _ONE_EACH)
    if name in LOG_PROBS and jnp.issubdtype(array.dtype, jnp.floating):
        check_array(name, array)
    if array.dtype.kind not in "fiub" and array.size and array.dtype.name != "bfloat16":
        got = not_numbers(array)
        raise TypeError(
            f"{name}: got {got}, {shown(values)}, expected numbers, or None for all of them"
        )
    if name in INTEGERS and array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: got {array.dtype}, {shown(values)}, expected integers")
    check(
        name,
        f"shape {array.shape}",
        array.shape == (length,),
        f"{(length,)}, one for each response token",
    )
    if name in INTEGERS:
        check_within(name, array)
    else:
        in_f32(name, array)


class Piece(NamedTuple):
    """The tokens of a sample that become one segment of a row: all of them, or some that
    `prefixes` cut.
    """

    sample: int  # its number; for a shared prefix, of any sample that has it
    start: int  # the first token
    stop: int  # the token after the last
    bundle: int  # pieces with the same number must lie in the same row
    # the number of the piece that this one continues; None at the start of a sample
    parent: int | None = None
    shared: bool = False  # a prefix of several samples, which belongs to none of them


def whole_pieces(samples: Sequence[Sample]) -> list[Piece]:
    """A segment for each sample."""
    return [Piece(i, 0, len(sample.tokens), i) for i, sample in enumerate(samples)]


def batch_arrays(
    samples: Sequence[Sample],
    pieces: Sequence[Piece],
    packed: Packed,
    ids: Sequence[int],
    trees: bool,
) -> dict[str, np.ndarray | None]:
    """The arrays of a `RolloutBatch`, by name, from samples with these ids, packed in pieces."""
    tokens = [np.asarray(sample.tokens, np.int32) for sample in samples]
    masks = [sample.mask for sample in samples]
    pieces_tokens = [tokens[p.sample][p.start : p.stop] for p in pieces]
    positions = [np.arange(p.start, p.stop, dtype=np.int32) for p in pieces]
    # the value of token t + 1 stands at position t, which predicts it. The last position of a
    # segment has 0, except for a shared prefix, whose branches all continue with the same token
    targets = [tokens[p.sample][p.start + 1 : p.stop + 1] for p in pieces]
    loss_masks = [masks[p.sample][p.start + 1 : p.stop + 1] for p in pieces]
    first = [0] * len(pieces)
    arrays: dict[str, np.ndarray | None] = {
        "tokens": packed.place(pieces_tokens, 0, np.int32),
        "targets": packed.place(targets, 0, np.int32, first),
        "segment_ids": packed.segment_ids,
        "positions": packed.place(positions, 0, np.int32),
        "loss_mask": packed.place(loss_masks, 0, np.float32, first),
    }

    def place_numbers(
        name: str, numbers: Sequence[Any] | None, fill: int, dtype: DTypeLike
    ) -> None:
        arrays[name] = None
        if numbers is not None:
            of_pieces = [fill if p.shared else numbers[p.sample] for p in pieces]
            arrays[name] = packed.place_segments(of_pieces, fill, dtype)

    place_numbers("rewards", _rewards(samples), 0, np.float32)
    place_numbers("sample_ids", ids, -1, np.int32)
    place_numbers("group_ids", _all_or_none(samples, "group_id"), -1, np.int32)
    place_numbers("rollout_ids", _all_or_none(samples, "rollout_id"), -1, np.int32)
    before_response = [
        0 if p.shared else max(samples[p.sample].start - 1 - p.start, 0) for p in pieces
    ]
    for name in PER_TOKEN_VALUES:
        arrays[name] = _placed_values(name, samples, pieces, packed, before_response)
    for name, extras in extras_of(samples).items():
        arrays[PREFIX + name] = _placed_extras(name, extras, pieces, packed, before_response)
    if trees:
        parents = [0 if p.parent is None else packed.slot[p.parent] + 1 for p in pieces]
        arrays["parents"] = packed.place_segments(parents, 0, np.int32)
    return arrays


def _rewards(samples: Sequence[Sample]) -> list[float] | None:
    """The reward of each sample, NaN for none; None where no sample has one."""
    if all(sample.reward is None for sample in samples):
        return None
    return [np.nan if sample.reward is None else float(sample.reward) for sample in samples]


def _placed_values(
    name: str,
    samples: Sequence[Sample],
    pieces: Sequence[Piece],
    packed: Packed,
    before_response: Sequence[int],
) -> np.ndarray | None:
    """`[R, T]`, the values of response tokens of all samples, packed in pieces; None where no
    sample has them.
    """
    responses = _of_responses(samples, name)
    if responses is None:
        return None
    values = [() if p.shared else responses[p.sample] for p in pieces]
    dtype = np.int32 if name in INTEGERS else np.float32
    return packed.place(values, 0, dtype, before_response)


def _placed_extras(
    name: str,
    extras: Sequence[Extra],
    pieces: Sequence[Piece],
    packed: Packed,
    before_response: Sequence[int],
) -> np.ndarray:
    """`[R, T, ...]`, one extra of all samples, packed in pieces."""
    dtype = common_dtype(f"extras[{name!r}]", [extra.values for extra in extras])
    fill = extras[0].fill
    if extras[0].at == "input":
        values = [extras[p.sample].values[p.start : p.stop] for p in pieces]
        return packed.place(values, fill, dtype)
    values = [extras[p.sample].values for p in pieces]
    values = [x[:0] if p.shared else x for p, x in zip(pieces, values, strict=True)]
    return packed.place(values, fill, dtype, before_response)


def check_samples(samples: Sequence[Sample], name: str = "samples") -> None:
    """Raises unless there is at least one sample, and nothing else among them."""
    if not isinstance(samples, Sequence):
        raise TypeError(f"{name}: got {type(samples).__name__}, expected a sequence of Sample")
    check(name, "none", len(samples) > 0, "at least one")
    for i, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise TypeError(f"{name}[{i}]: got {type(sample).__name__}, expected Sample")


def check_sample_ids(ids: Sequence[int]) -> None:
    """Raises where two samples have one id: random draws and records of one would be used for
    the other.
    """
    seen: dict[int, int] = {}
    for i, number in enumerate(ids):
        first = seen.setdefault(number, i)
        check("sample_id", f"{number} for samples {first} and {i}", first == i, "one of its own")


def check_sample_ids_of_hosts(ids: Sequence[int], parallel: ParallelMesh) -> None:
    """Raises where two hosts gave one sample id to their samples, which would then be one rollout;
    all must call this.

    Hosts with the same data shards hold the same samples.
    """
    own_shard = min(multihost.local_data_shards(parallel))
    own = np.array([(number, own_shard) for number in ids], np.int64).reshape(-1, 2)
    shards: dict[int, int] = {}
    expected = "one of its own for each sample; add an offset of its own on each host, or give none"
    for number, shard in np.concatenate(multihost.gather(own)).tolist():
        check(
            "sample_id",
            f"{number} on several hosts",
            shards.setdefault(number, shard) == shard,
            expected,
        )


def extras_of(samples: Sequence[Sample]) -> dict[str, list[Extra]]:
    """By name, the extra of each sample; raises unless all samples have it, placed alike."""
    by_name: dict[str, list[Extra]] = {}
    names = dict.fromkeys(name for sample in samples for name in sample.extras or {})
    for name in names:
        extras: list[Extra] = []
        for i, sample in enumerate(samples):
            extra: Any = (sample.extras or {}).get(name)
            check(
                "extras",
                f"no {name!r} in sample {i}",
                extra is not None,
                "one in all samples or in none",
            )
            extras.append(extra)
            got = _form(extra)
            first = _form(extras[0])
            expected = f"the (at, fill, shape of a value) of sample 0, {first}"
            check(f"extras[{name!r}]", f"{got} in sample {i}", got == first, expected)
        by_name[name] = extras
    return by_name


def _form(extra: Extra) -> tuple[str, float, tuple[int, ...]]:
    return extra.at, extra.fill, extra.values.shape[1:]


def _of_responses(samples: Sequence[Sample], name: str) -> list[Any] | None:
    """The values of each sample's response tokens; an empty response has none to lack.

    None if no sample has them.
    """
    with_tokens = [sample for sample in samples if sample.start < len(sample.tokens)]
    if _all_or_none(with_tokens or samples, name) is None:
        return None
    values = [getattr(sample, name) for sample in samples]
    return [() if value is None else value for value in values]


def _all_or_none(samples: Sequence[Sample], name: str) -> list[Any] | None:
    values = [getattr(sample, name) for sample in samples]
    missing = [i for i, value in enumerate(values) if value is None]
    if len(missing) == len(values):
        return None
    check(
        name,
        f"None in sample {min(missing, default=None)}",
        not missing,
        "a value in all samples or in none",
    )
    return values

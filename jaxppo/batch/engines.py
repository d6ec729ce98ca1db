"""Reads the outputs of vLLM and SGLang as the tokens, masks and log-probs of a sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxppo.base.arrays import MAX_SAMPLED, check, check_choice
from jaxppo.batch.host import as_array, as_integers, as_list, from_bytes, is_whole, scalar, shown
from jaxppo.batch.token_sets import TokenSets

Truncated = Literal["train", "mask"]
ENDS = ("stop", "tool_calls", "length")
OF_OUTPUTS = ("tokens", "response_start")  # fields that every output gives
# fields that a caller may give in their place, where turns have none
OF_TURNS = ("rollout_log_probs", "nucleus")


class Turn(NamedTuple):
    """One request and its completion."""

    prompt: list[int]
    completion: list[int]  # with the token that stopped it
    log_probs: list[float] | None  # of the completion; None if the request did not ask for them
    finish_reason: str | None  # "stop", "length", "abort" or another of the engine's
    nucleus: TokenSets | None  # for each token of the completion, the ids that could be drawn
    # the version of the policy that drew each token of the completion
    versions: list[int] | None = None


def sample_fields(
    output: Any,
    read: Callable[[str, Any], Turn],
    loss_mask: Any,
    truncated: str,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """The fields of a `Sample` of one output or of several turns, see `Sample.from_vllm`."""
    turns = _turns(output, read)
    for name in OF_OUTPUTS:
        if name in fields:
            raise TypeError(
                f"{name}: got {shown(fields[name])} beside an output, expected none: the output"
                " says it"
            )
    turns = _with_empty_entries(turns)
    _check_same_entries(turns)
    tokens = list(turns[0].prompt)
    start = len(tokens)
    written: list[int] = []  # how many tokens the environment wrote before each completion
    for i, turn in enumerate(turns):
        added = _added(i, tokens, turn.prompt)
        tokens += added
        tokens += turn.completion
        written.append(len(added))
    values = _token_values(turns, written)
    for name in OF_TURNS:
        if name in values and fields.get(name) is not None:
            raise TypeError(f"{name}: got it beside an output that has it, expected one of the two")
    if fields.get("policy_versions") is not None:
        lengths = [count + len(turn.completion) for count, turn in zip(written, turns, strict=True)]
        values["policy_versions"] = _versions(fields["policy_versions"], lengths)
    values = fields | values
    last = turns[-1].finish_reason
    if values.get("reward") is not None and last not in ENDS:
        values["reward"] = float("nan")
    mask = _sampled(turns, written)
    if loss_mask is not None:
        mask *= _own_mask(loss_mask, len(mask))
    mask *= _weight(last, truncated)
    return {
        **values,
        "tokens": tokens,
        "response_start": start,
        "loss_mask": np.pad(mask, (start, 0)),
    }


def _turns(output: Any, read: Callable[[str, Any], Turn]) -> list[Turn]:
    """The turns of one output, or of a list of outputs."""
    is_one = not isinstance(output, Sequence) or isinstance(output, str)
    outputs = [output] if is_one else output
    turns = [read(f"output[{i}]", turn) for i, turn in enumerate(outputs)]
    check("output", "no turns", len(turns) > 0, "at least one")
    return turns


def _with_empty_entries(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, where one of no tokens has an empty entry of each kind that other turns have."""
    empty_entries: dict[str, Any] = {"log_probs": [], "nucleus": TokenSets.empty(0), "versions": []}
    filled = list(turns)
    for name, empty in empty_entries.items():
        if all(getattr(turn, name) is None for turn in turns):
            continue
        for i, turn in enumerate(filled):
            if not turn.completion and getattr(turn, name) is None:
                filled[i] = turn._replace(**{name: empty})
    return filled


def _check_same_entries(turns: Sequence[Turn]) -> None:
    """Raises where only some of the turns have an entry."""
    for name in ("log_probs", "nucleus", "versions"):
        missing = [i for i, turn in enumerate(turns) if getattr(turn, name) is None]
        if missing and len(missing) < len(turns):
            raise ValueError(
                f"{name}: got None in turn {missing[0]}, expected them in all turns or in none"
            )


def _token_values(turns: Sequence[Turn], written: Sequence[int]) -> dict[str, Any]:
    """The fields of a sample that the turns give, a value for each response token."""
    log_probs: list[float] = []
    nucleus: list[TokenSets] = []
    versions: list[int] = []
    for turn, count in zip(turns, written, strict=True):
        if turn.log_probs is not None:
            log_probs += [0.0] * count + turn.log_probs
        if turn.nucleus is not None:
            nucleus += [TokenSets.empty(count), turn.nucleus]
        if turn.versions is not None:
            # what the environment wrote has the version of the token after it, or else of the one
            # before
            of_added = turn.versions[:1] or versions[-1:]
            versions += of_added * count + turn.versions
    values: dict[str, Any] = {}
    if turns[0].log_probs is not None:
        values["rollout_log_probs"] = log_probs
    if turns[0].nucleus is not None:
        values["nucleus"] = TokenSets.join(nucleus)
    if turns[0].versions is not None:
        values["policy_versions"] = versions
    return values


def _sampled(turns: Sequence[Turn], written: Sequence[int]) -> np.ndarray:
    """f32, 1 for each response token that the policy drew, 0 for those that the environment
    wrote.
    """
    sampled: list[float] = []
    for turn, count in zip(turns, written, strict=True):
        sampled += [0.0] * count
        sampled += [1.0] * len(turn.completion)
    return np.asarray(sampled, np.float32)


def _own_mask(loss_mask: Any, length: int) -> np.ndarray:
    """The caller's mask of the tokens after the first prompt."""
    expected = f"0 and 1 for each of the {length} tokens after the first prompt"
    mask = as_array("loss_mask", loss_mask, expected)
    check("loss_mask", f"shape {mask.shape}", mask.shape == (length,), expected)
    good = mask.dtype.kind in "bifu" and bool(np.isin(mask, (0, 1)).all())
    check("loss_mask", shown(loss_mask), good, expected)
    return mask


def _versions(policy_versions: Any, lengths: Sequence[int]) -> Any:
    """The version of each response token, of a version for each turn; what is one number, or for
    each token, stays.
    """
    if np.ndim(as_array("policy_versions", policy_versions, "integers")) == 0:
        return policy_versions
    versions = as_integers("policy_versions", policy_versions)
    total = sum(lengths)
    expected = f"one for each of {len(lengths)} turns, or of {total} response tokens"
    check("policy_versions", len(versions), len(versions) in (len(lengths), total), expected)
    if len(versions) != len(lengths):
        return versions
    of_tokens = np.repeat(versions, lengths)
    one_reading = len(versions) != total or bool((of_tokens == versions).all())
    check("policy_versions", versions.tolist(), one_reading, f"{expected}, not what may be both")
    return of_tokens


def _added(turn: int, so_far: list[int], prompt: list[int]) -> list[int]:
    """The environment's tokens between the last completion and this one."""
    if prompt[: len(so_far)] == so_far:
        return prompt[len(so_far) :]
    differ = [
        i for i, (before, now) in enumerate(zip(so_far, prompt, strict=False)) if before != now
    ]
    same = min(differ, default=len(prompt))
    raise ValueError(
        f"output[{turn}]: got a prompt that leaves the tokens of the turns before at {same} of"
        f" {len(so_far)}, expected one that begins with them; text that was tokenised again is"
        " another sample"
    )


def _weight(finish_reason: str | None, truncated: str) -> float:
    check_choice("truncated", truncated, Truncated)
    ended = finish_reason in ENDS
    expected = "'stop' or 'length'; truncated='mask' keeps others"
    check("finish_reason", repr(finish_reason), ended or truncated == "mask", expected)
    if finish_reason == "length":
        return float(truncated == "train")
    return float(ended)


def _get(x: Any, *names: str) -> Any:
    """The first that exists of these entries of a dictionary, or attributes of one of the
    engine's objects, or None.
    """
    for name in names:
        if isinstance(x, Mapping):
            value = x.get(name)
        else:
            value = getattr(x, name, None)
        if value is not None:
            return value
    return None


def _ids(where: str, x: Any) -> list[int]:
    check(where, None, x is not None, "token ids")
    return as_integers(where, x, least=0).tolist()


def _log_probs(where: str, log_probs: Any, length: int) -> list[float]:
    values = [scalar(value) for value in as_list(where, log_probs, "one log-prob a sampled token")]
    check(
        where, f"{len(values)} log-probs", len(values) == length, f"{length}, one a sampled token"
    )
    for i, value in enumerate(values):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not value <= MAX_SAMPLED:
            expected = f"the log-prob of the sampled token, a number of at most {MAX_SAMPLED}"
            raise ValueError(f"{where}[{i}]: got {shown(value)}, expected {expected}")
    return [float(value) for value in values]


def _one_a_token(where: str, sets: TokenSets, completion: list[int]) -> TokenSets:
    check(
        where, f"{len(sets)} sets", len(sets) == len(completion), f"{len(completion)}, one a token"
    )
    return sets


def _with_drawn(where: str, sets: TokenSets, completion: list[int]) -> TokenSets:
    """The sets of a sampling mask, of which each holds the token that was drawn from it."""
    _one_a_token(where, sets, completion)
    for i, (token, ids) in enumerate(zip(completion, sets.tolist(), strict=True)):
        check(f"{where}[{i}]", f"ids without the sampled {token}", token in ids, "it among them")
    return sets


# vLLM


def vllm_turn(where: str, output: Any, choice: int | None) -> Turn:
    """A `RequestOutput`, or the answer of vLLM's completions, chat and generate endpoints;
    `where` stands in errors.
    """
    sampled = _choice(where, output, choice)
    prompt = _get(output, "prompt_token_ids")
    if prompt is None:
        prompt = _get(sampled, "prompt_token_ids")
    ids = _get(sampled, "token_ids")
    check(
        where,
        "no token_ids",
        ids is not None,
        "them; endpoints return them for return_token_ids=True",
    )
    completion = _ids(f"{where}.token_ids", ids)
    log_probs = _vllm_log_probs(f"{where}.logprobs", _get(sampled, "logprobs"), completion)
    nucleus = _get(sampled, "sampling_mask")
    if nucleus is not None:
        name = f"{where}.sampling_mask"
        nucleus = _with_drawn(name, TokenSets.of(name, nucleus), completion)
    prompt = _ids(f"{where}.prompt_token_ids", prompt)
    return Turn(prompt, completion, log_probs, _get(sampled, "finish_reason"), nucleus)


def _choice(where: str, output: Any, choice: int | None) -> Any:
    """The completion with this index, or the only one."""
    choices = _get(output, "outputs", "choices")
    check(where, _keys(output), choices is not None, "'outputs' or 'choices'")
    choice = scalar(choice)
    if choice is not None and not is_whole(choice):
        raise TypeError(f"choice: got {choice!r}, expected the index of a completion, or None")
    choices = as_list(f"{where}.outputs", choices, "a list of completions")
    chosen = [one for one in choices if choice is None or _get(one, "index") == choice]
    if len(chosen) != 1:
        has = ", ".join(str(_get(one, "index")) for one in choices) or "none"
        raise ValueError(
            f"choice: got {choice} for {where} with completions {has}, expected one of them"
        )
    return chosen[0]


def _vllm_log_probs(where: str, logprobs: Any, completion: list[int]) -> list[float] | None:
    """Log-probs as vLLM's completions, chat and generate endpoints return them."""
    length = len(completion)
    if logprobs is None:
        return None
    of_completions = _get(logprobs, "token_logprobs")
    if of_completions is not None:
        return _log_probs(where, of_completions, length)
    of_chat = _get(logprobs, "content")
    if of_chat is not None:
        entries = as_list(where, of_chat, "one entry a sampled token")
        return _log_probs(where, [_get(entry, "logprob") for entry in entries], length)
    if isinstance(logprobs, str) or not isinstance(logprobs, Sequence):
        got = _keys(logprobs)
        raise TypeError(
            f"{where}: got {got}, expected one dictionary a token, 'token_logprobs' or 'content'"
        )
    values = [
        _vllm_log_prob(entry, token) for token, entry in zip(completion, logprobs, strict=False)
    ]
    return _log_probs(where, [*values, *logprobs[length:]], length)


def _vllm_log_prob(entry: Any, token: int) -> Any:
    """The log-prob of a token in its dictionary of log-probs by id, or None."""
    if not isinstance(entry, Mapping):
        return None
    # keys are text where the dictionary went through JSON
    value = entry.get(token, entry.get(str(token)))
    if value is None or isinstance(value, (int, float)):
        return value
    return _get(value, "logprob")


# SGLang

_MASK = "output_token_sampling_mask"
_MASK_LOG_PROBS = "output_token_sampling_logprobs"
_MASK_IDS = f"{_MASK}_token_ids"
_MASK_LENGTHS = f"{_MASK}_lengths"


def sglang_turn(where: str, output: Any) -> Turn:
    """The result of /generate or `Engine.generate`, with the request's `input_ids` beside it;
    `where` is its name.
    """
    meta = _get(output, "meta_info")
    check(where, _keys(output), meta is not None, "'meta_info'")
    if not isinstance(meta, Mapping):
        raise TypeError(f"{where}.meta_info: got {type(meta).__name__}, expected a dictionary")
    completion, log_probs = _sglang_completion(where, output, meta)
    nucleus = _sampling_mask(where, meta, completion)
    if nucleus is not None:
        log_probs = _sampling_log_probs(where, meta, completion, nucleus)
    else:
        nucleus = _nucleus(where, meta, completion)
    reason = meta.get("finish_reason")
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    versions = _weight_versions(
        f"{where}.meta_info['weight_versions']", meta.get("weight_versions"), len(completion)
    )
    return Turn(
        _sglang_prompt(where, output, meta), completion, log_probs, reason, nucleus, versions
    )


def _sglang_completion(
    where: str, output: Any, meta: Mapping[str, Any]
) -> tuple[list[int], list[float] | None]:
    """The sampled tokens, and their log-probs, if the request asked for them."""
    triples = meta.get("output_token_logprobs")
    ids = _get(output, "output_ids")
    there = triples is not None or ids is not None
    check(where, "neither output_ids nor output_token_logprobs", there, "the sampled token ids")
    sampled: list[int] = []
    if ids is not None:
        sampled = _ids(f"{where}.output_ids", ids)
    if triples is None:
        return sampled, None
    name = f"{where}.output_token_logprobs"
    log_probs, completion = _triples(name, triples)
    same = completion[: len(sampled)] == sampled  # ids may lack the token that stopped it
    check(f"{where}.output_ids", "other tokens than output_token_logprobs has", same, "the same")
    count = meta.get("completion_tokens", len(completion))
    check(name, f"{len(completion)} tokens", count == len(completion), f"completion_tokens {count}")
    return completion, _log_probs(name, log_probs, len(completion))


def _triples(where: str, triples: Any) -> tuple[list[Any], list[int]]:
    """The log-probs and the ids of SGLang's (log-prob, id, text)."""
    expected = "(log-prob, id, text)"
    listed = as_list(where, triples, "a list")
    entries = [as_list(f"{where}[{i}]", triple, expected) for i, triple in enumerate(listed)]
    for i, entry in enumerate(entries):
        check(f"{where}[{i}]", shown(entry), len(entry) >= 2, expected)
    log_probs = [entry[0] for entry in entries]
    return log_probs, _ids(where, [entry[1] for entry in entries])


def _weight_versions(where: str, spans: Any, count: int) -> list[int] | None:
    """The version of each of these tokens; None where the engine was never told a number, as by
    default.
    """
    if spans is None:
        return None
    expected = "spans with version, start and end, which cover the output tokens one after another"
    of_tokens: list[Any] = []
    of_spans: list[int | None] = []
    for i, span in enumerate(as_list(where, spans, expected)):
        start = scalar(_get(span, "start"))
        end = scalar(_get(span, "end"))
        good = is_whole(start) and is_whole(end) and len(of_tokens) == start <= end
        check(f"{where}[{i}]", shown(span), good, expected)
        number = _version_number(scalar(_get(span, "version")))
        of_spans.append(number)
        of_tokens += [number] * (end - start)
    if all(number is None for number in of_spans):
        return None
    check(
        where,
        shown(spans),
        None not in of_spans,
        "a whole number as the version of each span, or of none",
    )
    check(
        where,
        f"spans of {len(of_tokens)} tokens",
        len(of_tokens) >= count,
        f"{count}, the output tokens",
    )
    return of_tokens[:count]


def _version_number(version: Any) -> int | None:
    """The number that a version is, or is written as; None for other names."""
    is_text = isinstance(version, str) and version.isdecimal()
    if is_text or is_whole(version):
        return int(version)
    return None


def _sglang_prompt(where: str, output: Any, meta: Mapping[str, Any]) -> list[int]:
    count = meta.get("prompt_tokens")
    ids = _get(output, "input_ids")
    if ids is None and meta.get("input_token_logprobs") is not None:
        _, ids = _triples(f"{where}.input_token_logprobs", meta["input_token_logprobs"])
    where = f"{where}.input_ids"
    check(where, None, ids is not None, "the prompt's token ids, which SGLang does not return")
    prompt = _ids(where, ids)
    good = count is None or count == len(prompt)
    check(where, f"{len(prompt)} tokens", good, f"{count}, the prompt_tokens of meta_info")
    return prompt


def _sampling_mask(where: str, meta: Mapping[str, Any], completion: list[int]) -> TokenSets | None:
    """The ids that could be drawn at each token, of a request with `return_sampling_mask`.

    They are one list a token, or flat as SGLang's store of outputs has them, with the number of
    each token's ids.
    """
    name = f"{where}.{_MASK}"
    mask = meta.get(_MASK)
    if mask is not None:
        return _with_drawn(name, TokenSets.of(name, mask), completion)
    ids = meta.get(_MASK_IDS)
    lengths = meta.get(_MASK_LENGTHS)
    if ids is None or lengths is None:
        _check_no_mask(where, meta)
        return None
    offsets = np.cumsum([0, *_ids(f"{where}.{_MASK_LENGTHS}", lengths)])
    return _with_drawn(name, TokenSets.flat(f"{where}.{_MASK_IDS}", ids, offsets), completion)


def _check_no_mask(where: str, meta: Mapping[str, Any]) -> None:
    """Raises where an output without a sampling mask has something that belongs to one."""
    lonely = [
        name for name in (_MASK_LOG_PROBS, _MASK_IDS, _MASK_LENGTHS) if meta.get(name) is not None
    ]
    # the number of sets stays in meta_info where the sets themselves went to the store
    number = f"{_MASK}_length"
    if meta.get(number):
        lonely.append(number)
    if lonely:
        expected = (
            f"expected {_MASK} too, or {_MASK_IDS} and {_MASK_LENGTHS} as the output store has them"
        )
        raise ValueError(f"{where}.{lonely[0]}: got it without the mask, {expected}")


def _sampling_log_probs(
    where: str, meta: Mapping[str, Any], completion: list[int], nucleus: TokenSets
) -> list[float] | None:
    """The log-probs within the mask: of the sampled tokens, or of all ids of the mask, flat or
    one list a token.
    """
    values: Any = meta.get(_MASK_LOG_PROBS)
    where = f"{where}.{_MASK_LOG_PROBS}"
    if values is None and meta.get("output_token_logprobs") is None:
        return None
    expected = (
        "the log-probs within the mask; those of output_token_logprobs are of the whole vocabulary"
    )
    check(where, "None beside a sampling mask", values is not None, expected)
    values = as_list(where, values, expected)
    if len(values) == nucleus.token_ids.size != len(completion):
        values = [
            values[first:last] for first, last in itertools.pairwise(nucleus.offsets.tolist())
        ]
    if len(values) == len(completion) and all(
        isinstance(x, (list, tuple, np.ndarray)) for x in values
    ):
        counts = [len(x) for x in values]
        sizes = nucleus.sizes.tolist()
        check(where, f"{counts} log-probs", counts == sizes, f"{sizes}, one an id of the mask")
        values = [
            x[ids.index(token)]
            for x, ids, token in zip(values, nucleus.tolist(), completion, strict=True)
        ]
    return _log_probs(where, values, len(completion))


def _nucleus(where: str, meta: Mapping[str, Any], completion: list[int]) -> TokenSets | None:
    """The ids that could be drawn at each token, from flat ids and offsets, lists or base64 of
    int32.
    """
    # slime's engine also calls them top_p_kept_...
    ids = _get(meta, "top_p_token_ids", "top_p_kept_token_ids")
    offsets = _get(meta, "top_p_token_offsets", "top_p_kept_token_offsets")
    if ids is None and offsets is None:
        return None
    both = ids is not None and offsets is not None
    check(where, "one of top_p_token_ids and top_p_token_offsets", both, "both")
    ids = _flat_integers(f"{where}.top_p_token_ids", ids)
    name = f"{where}.top_p_token_offsets"
    sets = TokenSets.flat(name, ids, _flat_integers(name, offsets))
    return _one_a_token(name, sets, completion)


def _flat_integers(where: str, x: Any) -> np.ndarray:
    if isinstance(x, (str, bytes)):
        return from_bytes(where, x)
    return np.asarray(_ids(where, x), np.int32)


def _keys(x: Any) -> str:
    if isinstance(x, Mapping):
        return f"keys {', '.join(map(repr, x))}"
    return type(x).__name__

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


class Turn(NamedTuple):
    """One request and its completion."""

    prompt: list[int]
    completion: list[int]  # with the token that stopped it
    log_probs: list[float] | None  # of the completion; None if the request did not ask for them
    finish_reason: str | None  # "stop", "length", "abort" or another of the engine's
    nucleus: TokenSets | None  # for each token of the completion, the ids that could be drawn
    versions: list[int] | None = None  # the version of the policy that drew each token of the completion


def sample_fields(
    output: Any, read: Callable[[str, Any], Turn], loss_mask: Any, truncated: str, fields: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a `Sample` of one output or of several turns, see `Sample.from_vllm`."""
    one = not isinstance(output, Sequence) or isinstance(output, str)
    turns = [read(f"output[{i}]", turn) for i, turn in enumerate([output] if one else output)]
    check("output", "no turns", len(turns) > 0, "at least one")
    for name in OF_OUTPUTS:
        if name in fields:
            raise TypeError(f"{name}: got {shown(fields[name])} beside an output, expected none: the output says it")
    tokens = list(turns[0].prompt)
    start = len(tokens)
    sampled: list[float] = []
    for name in ("log_probs", "nucleus", "versions"):
        missing = [i for i, turn in enumerate(turns) if getattr(turn, name) is None]
        if missing and len(missing) < len(turns):
            raise ValueError(f"{name}: got None in turn {missing[0]}, expected them in all turns or in none")
    log_probs: list[float] = []
    nucleus: list[TokenSets] = []
    versions: list[int] = []
    lengths = []
    for i, turn in enumerate(turns):
        added = _added(i, tokens, turn.prompt)
        tokens += added + turn.completion
        lengths.append(len(added) + len(turn.completion))
        sampled += [0.0] * len(added) + [1.0] * len(turn.completion)
        log_probs += [0.0] * len(added) + (turn.log_probs or [])
        nucleus += [] if turn.nucleus is None else [TokenSets.empty(len(added)), turn.nucleus]
        its = turn.versions or []
        versions += its[:1] * len(added) + its
    of_outputs: dict[str, Any] = {
        "rollout_log_probs": None if turns[0].log_probs is None else log_probs,
        "nucleus": TokenSets.join(nucleus) if nucleus else None,
    }
    for name, value in of_outputs.items():
        if value is not None and fields.get(name) is not None:
            raise TypeError(f"{name}: got it beside an output that has it, expected one of the two")
    found = fields | {name: value for name, value in of_outputs.items() if value is not None}
    if fields.get("policy_versions") is not None:
        found["policy_versions"] = _versions(fields["policy_versions"], lengths)
    elif turns[0].versions is not None:
        found["policy_versions"] = versions
    if found.get("reward") is not None and turns[-1].finish_reason not in ENDS:
        found["reward"] = float("nan")
    mask = np.asarray(sampled, np.float32)
    if loss_mask is not None:
        expected = f"0 and 1 for each of the {len(mask)} tokens after the first prompt"
        given = as_array("loss_mask", loss_mask, expected)
        check("loss_mask", f"shape {given.shape}", given.shape == mask.shape, expected)
        check(
            "loss_mask", shown(loss_mask), given.dtype.kind in "bifu" and bool(np.isin(given, (0, 1)).all()), expected
        )
        mask *= given
    mask *= _weight(turns[-1].finish_reason, truncated)
    return {**found, "tokens": tokens, "response_start": start, "loss_mask": np.pad(mask, (start, 0))}


def _versions(given: Any, lengths: Sequence[int]) -> Any:
    """The version of each response token, of a version for each turn; what is one number, or for each token, stays."""
    if np.ndim(as_array("policy_versions", given, "integers")) == 0:
        return given
    versions, total = as_integers("policy_versions", given), sum(lengths)
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
    if prompt[: len(so_far)] != so_far:
        same = next((i for i, (a, b) in enumerate(zip(so_far, prompt, strict=False)) if a != b), len(prompt))
        raise ValueError(
            f"output[{turn}]: got a prompt that leaves the tokens of the turns before at {same} of {len(so_far)}, "
            "expected one that begins with them; text that was tokenised again is another sample"
        )
    return prompt[len(so_far) :]


def _weight(finish_reason: str | None, truncated: str) -> float:
    check_choice("truncated", truncated, Truncated)
    ended, expected = finish_reason in ENDS, "'stop' or 'length'; truncated='mask' keeps others"
    check("finish_reason", repr(finish_reason), ended or truncated == "mask", expected)
    return float(ended and (finish_reason != "length" or truncated == "train"))


def _get(x: Any, *names: str) -> Any:
    """The first that exists of these entries of a dictionary, or attributes of one of the engine's objects, or None."""
    found = (x.get(name) if isinstance(x, Mapping) else getattr(x, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def _ids(where: str, x: Any) -> list[int]:
    check(where, None, x is not None, "token ids")
    return as_integers(where, x, least=0).tolist()


def _log_probs(where: str, given: Any, length: int) -> list[float]:
    values = [scalar(value) for value in as_list(where, given, "one log-prob a sampled token")]
    check(where, f"{len(values)} log-probs", len(values) == length, f"{length}, one a sampled token")
    for i, value in enumerate(values):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not value <= MAX_SAMPLED:
            expected = f"the log-prob of the sampled token, a number of at most {MAX_SAMPLED}"
            raise ValueError(f"{where}[{i}]: got {shown(value)}, expected {expected}")
    return [float(value) for value in values]


def _one_a_token(where: str, sets: TokenSets, completion: list[int]) -> TokenSets:
    check(where, f"{len(sets)} sets", len(sets) == len(completion), f"{len(completion)}, one a token")
    return sets


def _with_drawn(where: str, sets: TokenSets, completion: list[int]) -> TokenSets:
    """The sets of a sampling mask, of which each holds the token that was drawn from it."""
    _one_a_token(where, sets, completion)
    for i, (token, found) in enumerate(zip(completion, sets.tolist(), strict=True)):
        check(f"{where}[{i}]", f"ids without the sampled {token}", token in found, "it among them")
    return sets


# vLLM


def vllm_turn(where: str, output: Any, choice: int | None) -> Turn:
    """A `RequestOutput`, or the answer of vLLM's completions, chat and generate endpoints; `where` stands in errors."""
    choices = _get(output, "outputs", "choices")
    check(where, _keys(output), choices is not None, "'outputs' or 'choices'")
    choice = scalar(choice)
    if choice is not None and not is_whole(choice):
        raise TypeError(f"choice: got {choice!r}, expected the index of a completion, or None")
    choices = as_list(f"{where}.outputs", choices, "a list of completions")
    found = choices if choice is None else [c for c in choices if _get(c, "index") == choice]
    if len(found) != 1:
        has = ", ".join(str(_get(c, "index")) for c in choices) or "none"
        raise ValueError(f"choice: got {choice} for {where} with completions {has}, expected one of them")
    one = found[0]
    prompt, ids = _get(output, "prompt_token_ids"), _get(one, "token_ids")
    prompt = _get(one, "prompt_token_ids") if prompt is None else prompt
    check(where, "no token_ids", ids is not None, "them; endpoints return them for return_token_ids=True")
    completion = _ids(f"{where}.token_ids", ids)
    log_probs = _vllm_log_probs(f"{where}.logprobs", _get(one, "logprobs"), completion)
    nucleus, of_mask = _get(one, "sampling_mask"), f"{where}.sampling_mask"
    if nucleus is not None:
        nucleus = _with_drawn(of_mask, TokenSets.of(of_mask, nucleus), completion)
    return Turn(_ids(f"{where}.prompt_token_ids", prompt), completion, log_probs, _get(one, "finish_reason"), nucleus)


def _vllm_log_probs(where: str, found: Any, completion: list[int]) -> list[float] | None:
    if found is None:
        return None
    if (by_token := _get(found, "token_logprobs")) is not None:  # completions
        return _log_probs(where, by_token, len(completion))
    if (content := _get(found, "content")) is not None:  # chat
        entries = as_list(where, content, "one entry a sampled token")
        return _log_probs(where, [_get(entry, "logprob") for entry in entries], len(completion))
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"{where}: got {_keys(found)}, expected one dictionary a token, 'token_logprobs' or 'content'")
    values = []
    for token, entry in zip(completion, found, strict=False):
        # keys are text where the dictionary went through JSON
        value = entry.get(token, entry.get(str(token))) if isinstance(entry, Mapping) else None
        values.append(_get(value, "logprob") if value is not None and not isinstance(value, (int, float)) else value)
    return _log_probs(where, [*values, *found[len(completion) :]], len(completion))


# SGLang

_MASK, _MASK_LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
_FLAT = (f"{_MASK}_token_ids", f"{_MASK}_lengths")


def sglang_turn(where: str, output: Any) -> Turn:
    """The result of /generate or `Engine.generate`, with the request's `input_ids` beside it; `where` is its name."""
    meta = _get(output, "meta_info")
    check(where, _keys(output), meta is not None, "'meta_info'")
    if not isinstance(meta, Mapping):
        raise TypeError(f"{where}.meta_info: got {type(meta).__name__}, expected a dictionary")
    triples, ids = meta.get("output_token_logprobs"), _get(output, "output_ids")
    there = triples is not None or ids is not None
    check(where, "neither output_ids nor output_token_logprobs", there, "the sampled token ids")
    log_probs, completion = None, [] if ids is None else _ids(f"{where}.output_ids", ids)
    if triples is not None:
        pairs, of_triples = _triples(f"{where}.output_token_logprobs", triples)
        same = of_triples[: len(completion)] == completion  # ids may lack the token that stopped it
        check(f"{where}.output_ids", "other tokens than output_token_logprobs has", same, "the same")
        completion, of_log_probs = of_triples, f"{where}.output_token_logprobs"
        count = meta.get("completion_tokens", len(completion))
        check(of_log_probs, f"{len(completion)} tokens", count == len(completion), f"completion_tokens {count}")
        log_probs = _log_probs(of_log_probs, pairs, len(completion))
    nucleus = _sampling_mask(where, meta, completion)
    if nucleus is not None:
        log_probs = _sampling_log_probs(where, meta, completion, nucleus)
    else:
        nucleus = _nucleus(where, meta, completion)
    reason = meta.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    versions = _weight_versions(f"{where}.meta_info['weight_versions']", meta.get("weight_versions"), len(completion))
    return Turn(_sglang_prompt(where, output, meta), completion, log_probs, reason, nucleus, versions)


def _triples(where: str, triples: Any) -> tuple[list[Any], list[int]]:
    """The log-probs and the ids of SGLang's (log-prob, id, text)."""
    each = [
        as_list(f"{where}[{i}]", x, "(log-prob, id, text)") for i, x in enumerate(as_list(where, triples, "a list"))
    ]
    for i, x in enumerate(each):
        check(f"{where}[{i}]", shown(x), len(x) >= 2, "(log-prob, id, text)")
    return [x[0] for x in each], _ids(where, [x[1] for x in each])


def _weight_versions(where: str, spans: Any, count: int) -> list[int] | None:
    """The version of each of these tokens; None where the engine was never told a number, as by default."""
    expected = "spans with version, start and end, which cover the output tokens one after another"
    found: list[Any] = []
    numbers: list[int | None] = []
    for i, span in enumerate([] if spans is None else as_list(where, spans, expected)):
        start, end = (scalar(_get(span, name)) for name in ("start", "end"))
        good = is_whole(start) and is_whole(end) and len(found) == start <= end
        check(f"{where}[{i}]", shown(span), good, expected)
        version = scalar(_get(span, "version"))
        text = isinstance(version, str) and version.isdecimal()
        numbers.append(int(version) if text or is_whole(version) else None)
        found += numbers[-1:] * (end - start)
    if not numbers or all(number is None for number in numbers):
        return None
    check(where, shown(spans), None not in numbers, "a whole number as the version of each span, or of none")
    check(where, f"spans of {len(found)} tokens", len(found) >= count, f"{count}, the output tokens")
    return found[:count]


def _sglang_prompt(where: str, output: Any, meta: Mapping[str, Any]) -> list[int]:
    count, given = meta.get("prompt_tokens"), _get(output, "input_ids")
    if given is None and meta.get("input_token_logprobs") is not None:
        given = _triples(f"{where}.input_token_logprobs", meta["input_token_logprobs"])[1]
    where = f"{where}.input_ids"
    check(where, None, given is not None, "the prompt's token ids, which SGLang does not return")
    prompt = _ids(where, given)
    good = count is None or count == len(prompt)
    check(where, f"{len(prompt)} tokens", good, f"{count}, the prompt_tokens of meta_info")
    return prompt


def _sampling_mask(where: str, meta: Mapping[str, Any], completion: list[int]) -> TokenSets | None:
    """The ids that could be drawn at each token, of a request with `return_sampling_mask`.

    They are one list a token, or flat as SGLang's store of outputs has them, with the number of each token's ids.
    """
    given, flat, lengths = (meta.get(name) for name in (_MASK, *_FLAT))
    if given is None and (flat is None or lengths is None):
        # the number of sets stays in meta_info where the sets themselves went to the store
        lonely = [name for name in (_MASK_LOG_PROBS, *_FLAT) if meta.get(name) is not None]
        lonely += [f"{_MASK}_length"] if meta.get(f"{_MASK}_length") else []
        for name in lonely:
            expected = f"expected {_MASK} too, or {' and '.join(_FLAT)} as the output store has them"
            raise ValueError(f"{where}.{name}: got it without the mask, {expected}")
        return None
    if given is None:
        offsets = np.cumsum([0, *_ids(f"{where}.{_FLAT[1]}", lengths)])
        sets = TokenSets.flat(f"{where}.{_FLAT[0]}", flat, offsets)
    else:
        sets = TokenSets.of(f"{where}.{_MASK}", given)
    return _with_drawn(f"{where}.{_MASK}", sets, completion)


def _sampling_log_probs(
    where: str, meta: Mapping[str, Any], completion: list[int], nucleus: TokenSets
) -> list[float] | None:
    """The log-probs within the mask: of the sampled tokens, or of all ids of the mask, flat or one list a token."""
    given: Any = meta.get(_MASK_LOG_PROBS)
    where = f"{where}.{_MASK_LOG_PROBS}"
    if given is None and meta.get("output_token_logprobs") is None:
        return None
    within = "the log-probs within the mask; those of output_token_logprobs are of the whole vocabulary"
    check(where, "None beside a sampling mask", given is not None, within)
    given = as_list(where, given, within)
    if len(given) == nucleus.token_ids.size != len(completion):
        given = [given[first:last] for first, last in itertools.pairwise(nucleus.offsets.tolist())]
    if len(given) == len(completion) and all(isinstance(x, (list, tuple, np.ndarray)) for x in given):
        sizes, expected = [len(x) for x in given], nucleus.sizes.tolist()
        check(where, f"{sizes} log-probs", sizes == expected, f"{expected}, one an id of the mask")
        given = [x[ids.index(token)] for x, ids, token in zip(given, nucleus.tolist(), completion, strict=True)]
    return _log_probs(where, given, len(completion))


def _nucleus(where: str, meta: Mapping[str, Any], completion: list[int]) -> TokenSets | None:
    """The ids that could be drawn at each token, from flat ids and offsets, lists or base64 of int32."""
    names = ("top_p_token_ids", "top_p_token_offsets")  # or top_p_kept_..., as slime's engine also calls them
    found = [(f"{where}.{name}", _get(meta, name, name.replace("top_p", "top_p_kept"))) for name in names]
    given = [(name, x) for name, x in found if x is not None]
    if not given:
        return None
    check(where, f"one of {' and '.join(names)}", len(given) == 2, "both")
    flat, offsets = (
        from_bytes(name, x) if isinstance(x, (str, bytes)) else np.asarray(_ids(name, x), np.int32) for name, x in given
    )
    of_offsets = given[1][0]
    return _one_a_token(of_offsets, TokenSets.flat(of_offsets, flat, offsets), completion)


def _keys(x: Any) -> str:
    return f"keys {', '.join(map(repr, x))}" if isinstance(x, Mapping) else type(x).__name__

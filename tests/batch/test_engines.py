"""Samples from the results of inference engines.

The dictionaries restate the shapes, in August 2026, of vLLM (vllm/outputs.py, vllm/logprobs.py,
vllm/entrypoints/openai/*/protocol.py with return_token_ids) and of SGLang
(srt/managers/tokenizer_manager.py and schedule_batch.py: triples of log-prob, token and text,
finish reasons as dictionaries, the nucleus as base64 of int32 under the names that slime reads).
"""

import base64
import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from jaxppo import RolloutBatch, Sample, advantages
from jaxppo.batch.nucleus import pack_nucleus_ids

_MASK = "output_token_sampling_mask"
PROMPT = [11, 12, 13]
FIRST = [21, 22]
TOOL = [31, 32, 33]
SECOND = [41]


@dataclasses.dataclass
class Logprob:
    """As vLLM's."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def completion(tokens, reason="stop", *, index=0, first=-0.5, log_probs=True):
    """A CompletionOutput of log-probs -0.5, -1.5 and so on, with the most likely token beside
    each.
    """
    entries = [
        {9: Logprob(-0.1, 1, "x"), t: Logprob(first - i, 2, "y")} for i, t in enumerate(tokens)
    ]
    return {
        "index": index, "text": "...", "token_ids": tokens, "cumulative_logprob": None, "finish_reason": reason,
        "logprobs": entries if log_probs else None, "stop_reason": None,
    }  # fmt: skip


def request(prompt, *outputs):
    return {
        "request_id": "0",
        "prompt": "...",
        "prompt_token_ids": prompt,
        "outputs": list(outputs),
        "finished": True,
    }


def choice_of(kind):
    """The answers of vLLM's endpoints for one request."""
    values = [-0.5, -1.5]
    choice = {"index": 0, "token_ids": FIRST, "finish_reason": "stop", "stop_reason": None}
    if kind == "completions":
        logprobs = {
            "text_offset": [0, 1],
            "token_logprobs": values,
            "tokens": ["a", "b"],
            "top_logprobs": [{}, {}],
        }
        return {
            "id": "cmpl-0",
            "choices": [choice | {"prompt_token_ids": PROMPT, "text": "ab", "logprobs": logprobs}],
        }
    content = {
        "content": [{"token": "a", "logprob": x, "bytes": [97], "top_logprobs": []} for x in values]
    }
    return {
        "id": "chatcmpl-0",
        "prompt_token_ids": PROMPT,
        "choices": [choice | {"logprobs": content}],
    }


def through_json(output):
    """Keys of the log-probs are text there."""
    one = output["outputs"][0]
    entries = [
        {str(t): dataclasses.asdict(v) for t, v in entry.items()} for entry in one["logprobs"]
    ]
    return output | {"outputs": [one | {"logprobs": entries}]}


def as_object(output):
    return SimpleNamespace(
        **output | {"outputs": [SimpleNamespace(**x) for x in output["outputs"]]}
    )


def sglang(
    prompt, tokens, reason="stop", *, log_probs=True, nucleus=None, encoded=True, kept="", **entries
):
    meta = {
        "id": "0", "finish_reason": {"type": reason, "matched": 2}, "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens), "cached_tokens": 0, "weight_version": "default",
    }  # fmt: skip
    if log_probs:
        meta["output_token_logprobs"] = [(-0.5 - i, t, None) for i, t in enumerate(tokens)]
    if nucleus is not None:
        flat = [i for ids in nucleus for i in ids]
        offsets = np.cumsum([0, *map(len, nucleus)]).tolist()

        def wire(x):
            return base64.b64encode(np.asarray(x, "<i4").tobytes()).decode() if encoded else x

        meta |= {f"top_p_{kept}token_ids": wire(flat), f"top_p_{kept}token_offsets": wire(offsets)}
    return {"text": "...", "input_ids": prompt, "output_ids": tokens, "meta_info": meta} | entries


ONE_TURN = {
    "RequestOutput as a dictionary": lambda: request(PROMPT, completion(FIRST)),
    "through JSON": lambda: through_json(request(PROMPT, completion(FIRST))),
    "RequestOutput": lambda: as_object(request(PROMPT, completion(FIRST))),
    "/v1/completions": lambda: choice_of("completions"),
    "/v1/chat/completions": lambda: choice_of("chat"),
}


@pytest.mark.parametrize("shape", ONE_TURN)
def test_one_turn_of_vllm(shape):
    sample = Sample.from_vllm(ONE_TURN[shape](), reward=2.0, group_id=3)
    assert sample.tokens == PROMPT + FIRST
    assert (sample.start, sample.mask.tolist()) == (3, [0, 0, 0, 1, 1])
    assert sample.rollout_log_probs == [-0.5, -1.5]
    assert (sample.reward, sample.group_id, sample.nucleus) == (2.0, 3, None)


def test_one_turn_of_sglang():
    sample = Sample.from_sglang(sglang(PROMPT, FIRST), reward=2.0)
    assert (sample.tokens, sample.start, sample.rollout_log_probs) == (
        PROMPT + FIRST,
        3,
        [-0.5, -1.5],
    )
    # output_ids may lack the token that stopped it, which was sampled and has loss
    assert Sample.from_sglang(sglang(PROMPT, FIRST, output_ids=FIRST[:-1])).tokens == PROMPT + FIRST
    # the prompt as input_token_logprobs have it, of logprob_start_len=0
    told = sglang(PROMPT, FIRST, input_ids=None)
    told["meta_info"]["input_token_logprobs"] = [
        (None, 11, None),
        (-1.0, 12, None),
        (-2.0, 13, None),
    ]
    assert Sample.from_sglang(told).tokens == PROMPT + FIRST


def mask_of(*shapes):
    """SGLang's answer to `return_sampling_mask`: log-probs of the whole vocabulary beside those
    within the mask.

    In September 2026 `output_token_sampling_mask` is one list a token. With it come the log-probs
    of the sampled tokens, or, for sampling_logprobs_mode="support", one list a token; a store of
    outputs has the same flat.
    """
    mask, log_probs = shapes
    name = "output_token_sampling_mask"
    masks = {
        "nested": {name: [[21, 5], [7, 22, 9]], f"{name}_length": 2},
        "flat": {
            f"{name}_token_ids": np.array([21, 5, 7, 22, 9], np.int32),
            f"{name}_lengths": np.array([2, 3]),
        },
    }
    within = {
        "of the sampled": [-0.25, -0.75],
        "of the sampled, numpy": np.array([-0.25, -0.75], np.float32),
        "of the mask": [[-0.25, -1.5], [-2.0, -0.75, -1.0]],
        "of the mask, flat": np.array([-0.25, -1.5, -2.0, -0.75, -1.0], np.float32),
    }
    return masks[mask] | {"output_token_sampling_logprobs": within[log_probs]}


@pytest.mark.parametrize("mask", ["nested", "flat"])
@pytest.mark.parametrize(
    "log_probs", ["of the sampled", "of the sampled, numpy", "of the mask", "of the mask, flat"]
)
@pytest.mark.parametrize("whole", [True, False], ids=["beside others", "alone"])
def test_the_sampling_mask_of_sglang(mask, log_probs, whole):
    """The log-probs are those within the mask, the distribution that the tokens were drawn from."""
    output = sglang(PROMPT, FIRST, log_probs=whole)
    output["meta_info"] |= mask_of(mask, log_probs)
    sample = Sample.from_sglang(output)
    assert (sample.tokens, sample.rollout_log_probs) == (PROMPT + FIRST, [-0.25, -0.75])
    assert sample.nucleus.tolist() == [[21, 5], [7, 22, 9]]
    batch = RolloutBatch.from_samples([sample], row_length=8)
    np.testing.assert_allclose(batch.rollout_log_probs[0, 2:4], [-0.25, -0.75])
    assert [
        sorted({*x} - {-1}) for x in pack_nucleus_ids(None, [sample], batch)[0, 2:4].tolist()
    ] == [
        [5, 21],
        [7, 9, 22],
    ]


def test_a_sampling_mask_without_log_probs():
    """Nobody asked for any; log-probs of the whole vocabulary beside a mask are refused, below."""
    output = sglang(PROMPT, FIRST, log_probs=False)
    output["meta_info"] |= {"output_token_sampling_mask": [[21, 5], [22]]}
    sample = Sample.from_sglang(output)
    assert (sample.rollout_log_probs, sample.nucleus.tolist()) == (None, [[21, 5], [22]])


@pytest.mark.parametrize("value", [np.float32(-1.0), 0, -1, 0.125, -np.inf, np.float16(-0.5)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_log_probs_of_samplers_in_bf16(engine, value):
    """Those of TPUs round a log-prob of 0 up to 0.125, and one of a token that they should not
    draw is -inf.
    """
    assert given_log_prob(engine, value).rollout_log_probs == [-0.5, float(value)]


def given_log_prob(engine, value):
    if engine == "vllm":
        return Sample.from_vllm(
            request(PROMPT, completion(FIRST) | {"logprobs": {"token_logprobs": [-0.5, value]}})
        )
    triples = [(-0.5, FIRST[0], None), (value, FIRST[1], None)]
    return Sample.from_sglang(changed(sglang(PROMPT, FIRST), output_token_logprobs=triples))


@pytest.mark.parametrize(
    "value", [np.nan, 0.25, np.inf, True, np.True_, "-0.5", [-0.5], np.float32("nan")], ids=repr
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_no_log_prob_is_refused_with_its_place(engine, value):
    with pytest.raises(
        ValueError,
        match=r"output\[0\]\.(output_token_)?logprobs\[1\]: got .*expected the log-prob of",
    ):
        given_log_prob(engine, value)


@pytest.mark.parametrize(
    "shape", [lambda x: x, through_json, as_object], ids=["dictionary", "JSON", "object"]
)
def test_the_nucleus_of_vllm(shape):
    """Its SamplingMask: flat token_ids, and offsets of each sampled token's set."""
    output = request(PROMPT, completion(FIRST))
    output["outputs"][0]["sampling_mask"] = {"token_ids": [21, 5, 22], "offsets": [0, 2, 3]}
    sample = Sample.from_vllm(shape(output))
    assert sample.nucleus.tolist() == [[21, 5], [22]]
    batch = RolloutBatch.from_samples([sample], row_length=8)
    expected = pack_nucleus_ids([[[21, 5], [22]]], [sample], batch)
    np.testing.assert_array_equal(pack_nucleus_ids(None, [sample], batch), expected)
    ragged = request(
        PROMPT,
        completion(FIRST) | {"sampling_mask": {"token_ids": [[21, 5], [22]], "offsets": None}},
    )
    assert Sample.from_vllm(shape(ragged)).nucleus.tolist() == [[21, 5], [22]]
    with pytest.raises(
        TypeError, match=r"sampling_mask: got something without a length .* expected .* or offsets"
    ):
        Sample.from_vllm(
            request(PROMPT, completion(FIRST) | {"sampling_mask": {"token_ids": [21, 5, 22]}})
        )
    output["outputs"][0]["sampling_mask"]["offsets"] = [0, 3]
    with pytest.raises(
        ValueError, match=r"output\[0\].sampling_mask: got 1 sets, expected 2, one a token"
    ):
        Sample.from_vllm(output)
    output["outputs"][0]["sampling_mask"]["offsets"] = [0, 2, 4]
    with pytest.raises(
        ValueError, match="got 3 offsets to 4 for 3 ids, expected offsets that rise from 0 to 3"
    ):
        Sample.from_vllm(output)


def test_log_probs_that_nobody_asked_for_are_none():
    assert (
        Sample.from_vllm(request(PROMPT, completion(FIRST, log_probs=False))).rollout_log_probs
        is None
    )
    assert Sample.from_sglang(sglang(PROMPT, FIRST, log_probs=False)).rollout_log_probs is None


def vllm_turns(**options):
    return [
        request(PROMPT, completion(FIRST, "tool_calls")),
        request(PROMPT + FIRST + TOOL, completion(SECOND, first=-4.0, **options)),
    ]


def sglang_turns(second=SECOND, **options):
    first = sglang(PROMPT, FIRST, nucleus=[[21, 5], [22]])
    return [first, sglang(PROMPT + FIRST + TOOL, second, nucleus=[[41, 6, 7]], **options)]


def test_what_tools_wrote_between_turns_is_not_trained_on():
    sample = Sample.from_vllm(vllm_turns())
    assert sample.tokens == PROMPT + FIRST + TOOL + SECOND
    assert sample.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -1.5, 0, 0, 0, -4.0]
    # the user's own mask, of all after the first prompt, removes tokens and adds none
    masked = Sample.from_vllm(vllm_turns(), loss_mask=[0, 1, 1, 1, 1, 1])
    assert masked.mask.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert masked.start == 3  # and the log-probs still begin there
    batch = RolloutBatch.from_samples([sample, masked], row_length=10)
    np.testing.assert_array_equal(batch.loss_mask[0], [0, 0, 1, 1, 0, 0, 0, 1, 0, 0])
    np.testing.assert_allclose(batch.rollout_log_probs[0], [0, 0, -0.5, -1.5, 0, 0, 0, -4.0, 0, 0])


@pytest.mark.parametrize("kept", ["", "kept_"])
@pytest.mark.parametrize("encoded", [True, False])
def test_nuclei_of_sglang_reach_the_batch(encoded, kept):
    sample = Sample.from_sglang(sglang_turns(encoded=encoded, kept=kept))
    assert sample.nucleus.tolist() == [[21, 5], [22], [], [], [], [41, 6, 7]]
    batch = RolloutBatch.from_samples([sample], row_length=10)
    ids = pack_nucleus_ids(None, [sample], batch)
    assert ids.shape == (1, 10, 4)
    assert [[i for i in row if i >= 0] for row in ids[0].tolist()] == [
        [],
        [],
        [21, 5],
        [22],
        [],
        [],
        [],
        [41, 6, 7],
        [],
        [],
    ]
    np.testing.assert_array_equal(ids, pack_nucleus_ids([sample.nucleus.tolist()], [sample], batch))
    with pytest.raises(
        ValueError, match=r"samples\[1\].nucleus: got None, expected the recorded ids"
    ):
        pack_nucleus_ids(None, [sample, Sample([1, 2], response_start=1)], batch)


def test_one_of_several_completions():
    several = request(PROMPT, completion(FIRST), completion(SECOND, index=1))
    assert Sample.from_vllm(several, choice=1).tokens == PROMPT + SECOND
    with pytest.raises(
        ValueError, match=r"choice: got None for output\[0\] with completions 0, 1, expected one of"
    ):
        Sample.from_vllm(several)
    with pytest.raises(ValueError, match=r"choice: got 2 for output\[0\] with completions 0, 1"):
        Sample.from_vllm(several, choice=2)


@pytest.mark.parametrize(
    ("reason", "truncated", "mask"),
    [
        ("stop", "mask", 1),
        ("length", "train", 1),
        ("length", "mask", 0),
        ("abort", "mask", 0),
        (None, "mask", 0),
    ],
)
def test_truncated_samples_are_trained_on_or_masked(reason, truncated, mask):
    ours = Sample.from_vllm(request(PROMPT, completion(FIRST, reason)), truncated=truncated)
    theirs = Sample.from_sglang(sglang(PROMPT, FIRST, reason), truncated=truncated)
    for sample in (ours, theirs):
        assert sample.mask.tolist() == [0, 0, 0, mask, mask]
        assert (sample.start, len(sample.rollout_log_probs)) == (3, 2)


def test_an_aborted_request_has_no_reward():
    """Its reward moved the advantages of the others: dr_grpo gave 50.75 for 0.5."""
    kinds = {"truncated": "mask", "group_id": 7}
    ends = {"stop": 1.0, "length": 0.0, "abort": -100.0, None: -100.0}
    samples = [
        made
        for reason, reward in ends.items()
        for made in (
            Sample.from_vllm(request(PROMPT, completion(FIRST, reason)), reward=reward, **kinds),
            Sample.from_sglang(sglang(PROMPT, FIRST, reason), reward=reward, **kinds),
        )
    ]
    batch = RolloutBatch.from_samples(samples, row_length=64)
    batch.validate(vocab_size=1000)
    assert advantages.dr_grpo(batch.rewards, batch.group_ids)[0].tolist() == [
        0.5,
        0.5,
        -0.5,
        -0.5,
        0,
        0,
        0,
        0,
    ]
    without = Sample.from_vllm(request(PROMPT, completion(FIRST, "abort")), truncated="mask")
    assert without.reward is None
    resumed = [sglang(PROMPT, FIRST, "abort"), sglang(PROMPT + FIRST, SECOND)]
    assert Sample.from_sglang(resumed, reward=1.0).reward == 1


def test_a_rollout_that_was_aborted_and_resumed_is_one_sample():
    turns = [sglang(PROMPT, FIRST, "abort"), sglang(PROMPT + FIRST, SECOND)]
    assert Sample.from_sglang(turns).mask.tolist() == [0, 0, 0, 1, 1, 1]


def test_an_empty_completion_is_a_sample_without_loss():
    sample = Sample.from_sglang(sglang(PROMPT, [], "length", nucleus=[]))
    assert (sample.tokens, sample.start, sample.rollout_log_probs, sample.nucleus.tolist()) == (
        PROMPT,
        3,
        [],
        [],
    )


def test_a_turn_without_tokens_has_no_log_probs_to_lack():
    """A request that was aborted before its first token, beside others and alone."""
    none = completion([], "abort", log_probs=False)
    first = [request(PROMPT, none), request(PROMPT, completion(FIRST))]
    sample = Sample.from_vllm(first)
    assert (sample.tokens, sample.rollout_log_probs) == (PROMPT + FIRST, [-0.5, -1.5])
    assert sample.mask.tolist() == [0, 0, 0, 1, 1]
    three = [request(PROMPT, none), request(PROMPT, completion([21, 22, 23]))]
    assert Sample.from_vllm(three, policy_versions=[8, 9]).policy_versions.tolist() == [9, 9, 9]
    last = [request(PROMPT, completion(FIRST)), request(PROMPT + FIRST + TOOL, none)]
    cut = Sample.from_vllm(last, truncated="mask")
    assert (cut.tokens, cut.rollout_log_probs) == (PROMPT + FIRST + TOOL, [-0.5, -1.5, 0, 0, 0])
    spans = [{"version": "8", "start": 0, "end": 2}]
    last = [changed(sglang(PROMPT, FIRST, nucleus=[[21, 5], [22]]), weight_versions=spans)]
    last.append(sglang(PROMPT + FIRST + TOOL, [], "abort", log_probs=False))
    theirs = Sample.from_sglang(last, truncated="mask")
    assert (theirs.rollout_log_probs, theirs.policy_versions) == ([-0.5, -1.5, 0, 0, 0], [8] * 5)
    assert theirs.nucleus.tolist() == [[21, 5], [22], [], [], []]
    alone = Sample.from_vllm(request(PROMPT, none), truncated="mask")
    batch = RolloutBatch.from_samples([alone, sample], row_length=5, rows=2)
    rows = [[0.0] * 5, [0, 0, -0.5, -1.5, 0]]
    assert sorted(batch.rollout_log_probs.tolist()) == sorted(rows)
    assert batch.loss_mask.sum() == 2
    nuclei = [dataclasses.replace(sample, nucleus=[[21], [22, 7]]), alone]
    packed = RolloutBatch.from_samples(nuclei, row_length=5, rows=2)
    assert (pack_nucleus_ids(None, nuclei, packed) >= 0).sum() == 3
    unasked = Sample.from_vllm(request(PROMPT, completion(FIRST, log_probs=False)))
    for pair in ([alone, unasked], [dataclasses.replace(alone, rollout_log_probs=[]), unasked]):
        assert RolloutBatch.from_samples(pair, row_length=5, rows=2).rollout_log_probs is None


def changed(output, **entries):
    return output | {"meta_info": output["meta_info"] | entries}


WRONG = {
    "aborted": (
        partial(Sample.from_sglang, sglang(PROMPT, FIRST, "abort")),
        r"finish_reason: got 'abort', expected 'stop'",
    ),
    "unfinished": (
        partial(Sample.from_vllm, request(PROMPT, completion(FIRST, None))),
        r"finish_reason: got None",
    ),
    "no turns": (partial(Sample.from_vllm, []), r"output: got no turns"),
    "tokenised again": (
        partial(
            Sample.from_vllm,
            [vllm_turns()[0], request([11, 12, 13, 21, 99, 31], completion(SECOND))],
        ),
        r"output\[1\]: got a prompt that leaves the tokens of the turns before at 4 of 5",
    ),
    "cut context": (
        partial(Sample.from_vllm, [vllm_turns()[0], request([11, 12], completion(SECOND))]),
        r"output\[1\]: got a prompt that leaves the tokens of the turns before at 2 of 5",
    ),
    "log-probs of one turn": (
        partial(Sample.from_vllm, vllm_turns(log_probs=False)),
        r"log_probs: got None in turn 1",
    ),
    "another dictionary": (
        partial(Sample.from_vllm, {"text": ""}),
        r"output\[0\]: got keys 'text', expected 'outputs'",
    ),
    "no token ids": (
        partial(Sample.from_vllm, {"choices": [{"index": 0, "text": "ab", "token_ids": None}]}),
        (
            r"output\[0\]: got no token_ids, expected them; endpoints return them for"
            r" return_token_ids=True"
        ),
    ),
    "no prompt": (
        partial(Sample.from_vllm, request(None, completion(FIRST))),
        r"prompt_token_ids: got None, expected",
    ),
    "a log-prob that is None": (
        partial(
            Sample.from_vllm,
            request(PROMPT, completion(FIRST) | {"logprobs": {"token_logprobs": [None, -1.0]}}),
        ),
        r"output\[0\].logprobs\[0\]: got None, expected the log-prob of the sampled token",
    ),
    "a sampled token without log-prob": (
        partial(
            Sample.from_vllm,
            request(PROMPT, completion(FIRST) | {"logprobs": [{21: Logprob(-1.0)}, {}]}),
        ),
        r"output\[0\].logprobs\[1\]: got None",
    ),
    "too few log-probs": (
        partial(
            Sample.from_vllm,
            request(PROMPT, completion(FIRST) | {"logprobs": [{21: Logprob(-1.0)}]}),
        ),
        r"output\[0\].logprobs: got 1 log-probs, expected 2",
    ),
    "mask": (
        partial(Sample.from_vllm, vllm_turns(), loss_mask=[1, 1]),
        r"loss_mask: got shape \(2,\), expected 0 and 1 for",
    ),
    "truncated": (
        partial(Sample.from_vllm, vllm_turns(), truncated="drop"),
        r"truncated: got 'drop', expected one of 'train', 'mask'",
    ),
    "text": (
        partial(Sample.from_sglang, sglang("abc", FIRST)),
        r"output\[0\].input_ids: got .*, expected a list of integers",
    ),
    "no meta": (
        partial(Sample.from_sglang, {"output_ids": FIRST}),
        r"output\[0\]: got keys 'output_ids', expected 'meta_info'",
    ),
    "no input ids": (
        partial(Sample.from_sglang, sglang(PROMPT, FIRST, input_ids=None)),
        r"input_ids: got None, expected the",
    ),
    "another prompt": (
        partial(Sample.from_sglang, sglang(PROMPT, FIRST, input_ids=[1])),
        r"got 1 tokens, expected 3, the prompt",
    ),
    "other ids": (
        partial(Sample.from_sglang, sglang(PROMPT, FIRST, output_ids=[1])),
        r"output_ids: got other tokens than",
    ),
    "count": (
        partial(Sample.from_sglang, changed(sglang(PROMPT, FIRST), completion_tokens=3)),
        r"output_token_logprobs: got 2 tokens, expected completion_tokens 3",
    ),
    "no ids": (
        partial(Sample.from_sglang, sglang(PROMPT, FIRST, log_probs=False, output_ids=None)),
        r"output\[0\]: got neither output_ids nor output_token_logprobs",
    ),
    "offsets": (
        partial(
            Sample.from_sglang,
            changed(sglang(PROMPT, FIRST), top_p_token_ids=[1, 2], top_p_token_offsets=[0, 2]),
        ),
        r"top_p_token_offsets: got 1 sets, expected 2, one a token",
    ),
    "a mask without its log-probs": (
        partial(
            Sample.from_sglang,
            changed(sglang(PROMPT, FIRST), output_token_sampling_mask=[[21], [22]]),
        ),
        (
            r"output\[0\].output_token_sampling_logprobs: got None beside a sampling mask, expected"
            r" the log-probs within"
        ),
    ),
    "log-probs without their mask": (
        partial(
            Sample.from_sglang,
            changed(sglang(PROMPT, FIRST), output_token_sampling_logprobs=[-0.5, -1.0]),
        ),
        (
            r"output\[0\].output_token_sampling_logprobs: got it without the mask, expected"
            r" output_token_sampling_mask"
        ),
    ),
    "a mask that lies in a store": (
        partial(
            Sample.from_sglang, changed(sglang(PROMPT, FIRST), output_token_sampling_mask_length=2)
        ),
        r"output\[0\].output_token_sampling_mask_length: got it without the mask",
    ),
    "a mask of other tokens": (
        partial(
            Sample.from_sglang,
            changed(
                sglang(PROMPT, FIRST),
                **mask_of("nested", "of the mask") | {_MASK: [[21, 5], [7, 23, 9]]},
            ),
        ),
        r"output_token_sampling_mask\[1\]: got ids without the sampled 22, expected it among them",
    ),
    "a mask of fewer tokens": (
        partial(Sample.from_sglang, changed(sglang(PROMPT, FIRST), **{_MASK: [[21, 5]]})),
        r"output_token_sampling_mask: got 1 sets, expected 2",
    ),
    "log-probs of another mask": (
        partial(
            Sample.from_sglang,
            changed(
                sglang(PROMPT, FIRST),
                **mask_of("nested", "of the mask") | {_MASK: [[21], [7, 22, 9]]},
            ),
        ),
        r"output_token_sampling_logprobs: got \[2, 3\] log-probs, expected \[1, 3\]",
    ),
    "half a nucleus": (
        partial(Sample.from_sglang, changed(sglang(PROMPT, FIRST), top_p_token_ids=[1, 2])),
        r"output\[0\]: got one of top_p_token_ids and top_p_token_offsets, expected both",
    ),
    "nuclei of other length": (
        partial(Sample, [1, 2], response_start=1, nucleus=[]),
        r"nucleus: got 0 sets of ids, expected 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name):
    make, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()

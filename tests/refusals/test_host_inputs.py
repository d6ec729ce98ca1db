"""What comes from the host: no number becomes another one, and what is refused is refused by name.

Each line of the tables was a wrong number without a word, or an error of Python or numpy, in an
earlier version.
"""

import base64
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import RolloutBatch, Sample
from jaxppo.batch.extras import Extra
from jaxppo.batch.nucleus import pack_nucleus_ids
from jaxppo.contrib import spans
from jaxppo.contrib.gigpo import state_groups, step_returns
from jaxppo.mismatch.routing import routed_experts
from sharding import pack

NAN = float("nan")
INF = float("inf")
IDS = np.array([[1, 2, 3, 4]])


def sample(**fields):
    return Sample(**{"tokens": [5, 6, 7, 8], "response_start": 2} | fields)


def packed(*samples, **options):
    return RolloutBatch.from_samples(samples, **{"row_length": 8} | options)


BATCH = packed(sample(sample_id=3))


def sglang(**meta):
    entries = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [(-0.5, 7, None), (-1.5, 8, None)],
    }
    return Sample.from_sglang({"input_ids": [5, 6], "meta_info": entries | meta})


def of_log_probs(*entries):
    return sglang(output_token_logprobs=list(entries))


def of_ids(*ids):
    entries = [(-0.5, i, None) for i in ids]
    return of_log_probs(*entries)


def sglang_prompt(ids):
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [(-0.5, 7, None)]}
    return Sample.from_sglang({"input_ids": ids, "meta_info": meta})


def vllm(fields=None, **entries):
    one = {"index": 0, "token_ids": [7, 8], "finish_reason": "stop"} | entries
    return Sample.from_vllm({"prompt_token_ids": [5, 6], "outputs": [one]}, **fields or {})


def turn(prompt, completion):
    return {
        "prompt_token_ids": prompt,
        "outputs": [{"index": 0, "token_ids": completion, "finish_reason": "stop"}],
    }


def distilled(own=(-1.0,), theirs=(-1.0,), of=(0,), its=(0,), **options):
    return spans.span_distillation(list(own), list(theirs), np.array(of), np.array(its), **options)


def rows(**arrays):
    given = {
        "tokens": IDS,
        "segment_ids": np.ones((1, 4), int),
        "positions": IDS - 1,
        "loss_mask": np.ones((1, 4)),
    }
    return RolloutBatch.from_target_aligned(targets=IDS, **given | arrays)


def with_extra(values, **options):
    return sample(extras={"a": values}, **options)


def traced(field, values):
    """A sample with a field that `jax.jit` traces."""

    @jax.jit
    def mask(x):
        return sample(**{field: x}).mask

    return mask(values)


@jax.jit
def traced_extra(values):
    return packed(with_extra(values)).tokens


@jax.jit
def traced_experts(rows):
    return routed_experts(rows, 1).values


EXTRA = r"extras\['a'\]"
CUT = base64.b64encode(b"12345").decode()
TURNS = [turn([5], [6, 7]), turn([5, 6, 7], [])]
REFUSED = {
    # extras
    "an extra beyond i32": (partial(with_extra, [2**40 + 3, 1]), f"{EXTRA}: got 1099511627779, expected int"),
    "an extra beyond i64": (partial(with_extra, [2**64, 1]), f"{EXTRA}: got object"),
    "an extra beyond f32": (partial(with_extra, [1e300, 1]), f"{EXTRA}: got 1e\\+300, expected"),
    "a bool among an extra's numbers": (partial(with_extra, [[1, 2], [True, 2]]), f"{EXTRA}: got a bool"),
    "half a fill of integers": (partial(with_extra, Extra([1, 2], fill=0.5)), f"{EXTRA}.fill: got 0.5"),
    "a fill beyond i32": (partial(with_extra, Extra([1, 2], fill=2**31)), f"{EXTRA}.fill: got 2147483648"),
    "a fill beyond f32": (partial(Extra, [1.0], fill=1e300), "fill: got 1e\\+300, expected"),
    "a fill beyond f16": (
        partial(with_extra, Extra(np.ones(2, np.float16), fill=1e6)),
        f"{EXTRA}.fill: got 1000000.0, expected a number that float16 holds",
    ),
    "integers that f32 rounds": (
        partial(packed, with_extra([2**24 + 1, 0]), with_extra([0.5, 0.5])),
        f"{EXTRA}: got 16777217 beside floats of another sample",
    ),
    "a traced extra": (partial(traced_extra, np.ones(2)), EXTRA),
    "an extra of a constructor beyond i32": (partial(rows, extras={"a": IDS + 2**40}), "extras.a: got 1099511627777"),
    "an extra of a constructor beyond f32": (partial(rows, extras={"a": IDS * 1e300}), "extras.a: got 1e\\+300"),
    "half a fill of a constructor's integers": (
        partial(rows, extras={"a": Extra(IDS, fill=0.5)}),
        "extras.a.fill: got 0.5",
    ),
    "rewards beyond f32": (partial(rows, rewards=np.array([[1e300]])), "rewards: got 1e\\+300, expected"),
    # place
    "placed beyond i32": (partial(BATCH.place, {3: [2**40 + 3, 1]}), r"values\[3\]: got 1099511627779"),
    "placed beyond f32": (partial(BATCH.place, {3: [1e300, 1]}), r"values\[3\]: got 1e\+300"),
    "placed with half a fill": (partial(BATCH.place, {3: [1, 2]}, fill=0.5), "fill: got 0.5, expected"),
    # samples
    "a bool among tokens": (partial(sample, tokens=[5, 6, True, 8]), "tokens: got a bool among"),
    "versions beyond i32": (partial(sample, policy_versions=[2**40, 1]), "policy_versions: got 1099511627776"),
    "advantages beyond f32": (partial(sample, advantages=[1e300, 1]), "advantages: got 1e\\+300"),
    "a reward beyond f32": (partial(sample, reward=1e300), "reward: got 1e\\+300"),
    "a traced reward": (partial(traced, "reward", 1.0), "reward: got .*Trace"),
    "a traced id": (partial(traced, "group_id", 1), "group_id: got .*Trace"),
    "traced tokens": (partial(traced, "tokens", np.ones(4, int)), "tokens: got a traced array"),
    "a key for an id": (partial(sample, group_id=jax.random.key(0)), "group_id: got"),
    # SGLang
    "half an id": (partial(of_ids, 7.9, 8), "output.*output_token_logprobs: got float64"),
    "an id of text": (partial(of_ids, "7", "8"), "output.*output_token_logprobs: got <U1"),
    "an id of True": (partial(of_ids, 7, True), "output.*output_token_logprobs: got a bool"),
    "an id of None": (partial(of_ids, 7, None), "output.*output_token_logprobs: got object"),
    "an id below 0": (partial(of_ids, 7, -1), "output.*output_token_logprobs: got -1"),
    "a prompt with True": (partial(sglang_prompt, [5, True]), "output.*input_ids: got a bool"),
    "a prompt of halves": (partial(sglang_prompt, [5, 6.5]), "output.*input_ids: got float64"),
    "log-probs that are a number": (partial(sglang, output_token_logprobs=5), "output.*logprobs: got int"),
    "log-probs without ids": (partial(of_log_probs, -0.5, -1.5), r"output.*logprobs\[0\]: got float"),
    "log-probs of one entry": (partial(of_log_probs, (-0.5,)), r"output.*logprobs\[0\]: got \[-0.5\]"),
    "meta that is a list": (
        partial(Sample.from_sglang, {"input_ids": [1], "meta_info": [1]}),
        "output.*meta_info: got",
    ),
    "a nucleus that is no base64": (
        partial(sglang, top_p_token_ids="a*b", top_p_token_offsets="cd"),
        "output.*top_p_token_ids: got 'a\\*b'",
    ),
    "a nucleus of cut bytes": (
        partial(sglang, top_p_token_ids=CUT, top_p_token_offsets=[0, 1, 1]),
        "output.*top_p_token_ids: got 'MTIzNDU=' .*multiple of element size",
    ),
    "log-probs of a mask that are a number": (
        partial(sglang, output_token_sampling_mask=[[7], [8]], output_token_sampling_logprobs=5),
        "output.*sampling_logprobs: got int",
    ),
    "spans of versions with a gap": (
        partial(sglang, weight_versions=[{"version": 8, "start": 0, "end": 1}, {"version": 9, "start": 2, "end": 3}]),
        r"output.*weight_versions'\]\[1\]: got .*'start': 2",
    ),
    "versions of too few tokens": (
        partial(sglang, weight_versions=[{"version": 8, "start": 0, "end": 1}]),
        r"output.*weight_versions'\]: got spans of 1 tokens, expected 2",
    ),
    "a version that is a number and one that is none": (
        partial(sglang, weight_versions=[{"version": "a", "start": 0, "end": 1}, {"version": 9, "start": 1, "end": 2}]),
        r"output.*weight_versions'\]: got .*, expected a whole number as the version of each span, or of none",
    ),
    # vLLM
    "a mask without the drawn token": (
        partial(vllm, sampling_mask=[[7], [9]]),
        r"output\[0\].sampling_mask\[1\]: got ids without the sampled 8, expected it among them",
    ),
    "ids with True": (partial(vllm, token_ids=[7, True]), "output.*token_ids: got a bool"),
    "log-probs of vLLM that are a number": (partial(vllm, logprobs={"token_logprobs": 5}), "output.*logprobs: got int"),
    "log-probs of vLLM that are text": (partial(vllm, logprobs="ab"), "output.*logprobs: got str"),
    "contents that are a number": (partial(vllm, logprobs={"content": 5}), "output.*logprobs: got int"),
    "outputs that are a number": (
        partial(Sample.from_vllm, {"prompt_token_ids": [5], "outputs": 5}),
        "output.*outputs: got int",
    ),
    "a ragged loss mask": (partial(vllm, {"loss_mask": [1, [0]]}), r"loss_mask: got \[1, \[0\]\]"),
    "tokens beside an output": (partial(vllm, {"tokens": [1, 2, 3, 4]}), "tokens: got .* beside an output"),
    "a start beside an output": (partial(vllm, {"response_start": 1}), "response_start: got 1 beside an output"),
    "log-probs beside those of an output": (
        partial(vllm, {"rollout_log_probs": [-1.0, -1.0]}, logprobs={"token_logprobs": [-0.5, -0.5]}),
        "rollout_log_probs: got it beside an output that has it",
    ),
    "a nucleus beside that of an output": (
        partial(vllm, {"nucleus": [[7], [8]]}, sampling_mask=[[7], [8]]),
        "nucleus: got it beside an output that has it",
    ),
    "versions of three turns": (partial(vllm, {"policy_versions": [1, 2, 3]}), "policy_versions: got 3, expected one"),
    "half a version": (partial(vllm, {"policy_versions": [1.5]}), "policy_versions: got float64"),
    # routed experts
    "an expert beyond i32": (partial(routed_experts, [[[2**40 + 3]]], 1), "rows: got 1099511627779"),
    "an expert twice": (partial(routed_experts, [[[1, 2], [3, 3]]], 1), r"rows: got one expert twice at \(0, 1\)"),
    "ragged rows": (partial(routed_experts, [[[1]], [[1, 2]]], 2), r"rows: got \[\[\[1\]\], "),
    "no rows": (partial(routed_experts, None, 2), "rows: got object"),
    "rows that are no base64": (partial(routed_experts, "a*b", 2, layers=1, top_k=1), "rows: got 'a\\*b'"),
    "rows of cut bytes": (partial(routed_experts, b"12345", 2, layers=1, top_k=1), "rows: got b'12345'"),
    "traced rows": (partial(traced_experts, np.ones((1, 1, 1), int)), "rows: got a"),
    # states and returns of steps
    "half a group": (partial(state_groups, [1.7, 1.2], ["a", "a"]), "group_ids: got float64"),
    "a group of text": (partial(state_groups, ["7"], ["a"]), "group_ids: got <U1"),
    "a group of None": (partial(state_groups, [None], ["a"]), "group_ids: got object"),
    "a state that is a list": (partial(state_groups, [7], [["a"]]), r"states\[0\]: got \['a'\], expected a"),
    "a state of lists": (partial(state_groups, [7], [(1, [2])]), r"states\[0\]: got \(1, \[2\]\), expected a"),
    "a state of NaN": (partial(state_groups, [7, 7], [NAN, NAN]), r"states\[0\]: got nan"),
    "states that are text": (partial(state_groups, [7, 7], "ab"), "states: got str"),
    "half a rollout": (partial(step_returns, [1.0, 2.0], [1.7, 1.2]), "rollout_ids: got float64"),
    "a reward of text": (partial(step_returns, ["1"], [1]), r"rewards\[0\]: got '1'"),
    "a reward of None": (partial(step_returns, [None], [1]), r"rewards\[0\]: got None"),
    "a reward of NaN": (partial(step_returns, [NAN], [1]), r"rewards\[0\]: got nan"),
    # spans
    "pairs for ends": (partial(spans.align_spans, [(0, 1), (1, 3)], [1, 3]), r"ends: got shape \(2, 2\), expected"),
    "half an end": (partial(spans.align_spans, [1.5, 3], [1, 3]), "ends: got float64"),
    "an end below 0": (partial(spans.align_spans, [-1, 3], [1, 3]), "ends: got -1"),
    "ends of text": (partial(spans.align_spans, ["1"], [1]), "ends: got <U1"),
    "ends of None": (partial(spans.align_spans, None, [1]), "ends: got object"),
    "probabilities of a student": (partial(distilled, own=[0.5]), r"log_probs: got \[0.5\], expected finite log-probs"),
    "probabilities of a teacher": (partial(distilled, theirs=[0.5]), "teacher_log_probs: got \\[0.5\\]"),
    "log-probs of text": (partial(distilled, own=["a"]), "log_probs: got <U1"),
    "half a span": (partial(distilled, of=[0.5]), "spans: got float64"),
    "a span below -1": (partial(distilled, its=[-2]), "teacher_spans: got -2"),
    "log-probs of two dimensions": (partial(distilled, own=[[-1.0]]), r"log_probs: got shape \(1, 1\)"),
    # packing
    "a text to pack": (partial(pack, "a", row_length=4), "sequences: got str"),
    "texts to pack": (partial(pack, ["a", "bc"], row_length=4), r"sequences\[0\]: got str"),
    "numbers to pack": (partial(pack, [1, 2], row_length=4), r"sequences\[0\]: got int"),
    "a number to pack": (partial(pack, 5, row_length=4), "sequences: got int"),
    "nuclei with True": (
        partial(pack_nucleus_ids, [[[7, True], [8]]], [sample(sample_id=3)], BATCH),
        r"recorded\[0\]: got a bool",
    ),
    "versions that may be of turns or of tokens": (
        partial(Sample.from_vllm, TURNS, policy_versions=[8, 9]),
        r"policy_versions: got \[8, 9\], expected one for each of 2 turns, or of 2 resp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    call, pattern = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) in (ValueError, TypeError)
    assert re.match(pattern, message), message
    assert re.search(r": got .*, expected ", message, re.DOTALL), message


def numpy_scalar(x):
    return np.asarray(x)[()]


SCALARS = {"jax": jnp.asarray, "numpy": np.asarray, "numpy's own": numpy_scalar}


@pytest.mark.parametrize("kind", SCALARS)
def test_arrays_without_dimensions_are_numbers(kind):
    """They were refused, or counted as an object without a name."""
    of = SCALARS[kind]
    numbers = {
        "response_start": 2,
        "reward": 0.5,
        "sample_id": 3,
        "group_id": 4,
        "rollout_id": 5,
        "advantages": -0.5,
    }
    got = sample(**{name: of(x) for name, x in numbers.items()})
    expected = sample(**numbers)
    assert all(
        getattr(got, name) == getattr(expected, name) for name in numbers if name != "advantages"
    )
    np.testing.assert_array_equal(packed(got).advantages, packed(expected).advantages)
    assert Extra([1], fill=of(-1)).fill == -1
    assert step_returns([of(1.0), of(2.0)], [of(1), of(1)], gamma=of(0.5)).tolist() == [2.0, 2.0]
    assert state_groups([of(7), of(7)], [of(1), of(1)]).tolist() == [0, 0]
    assert routed_experts([[[1]]], of(1)).values.tolist() == [[[1]]]
    np.testing.assert_allclose(distilled(coef=of(2.0)), [0.0])


def test_one_number_for_a_response():
    """`advantages=0.5` was refused where `loss_weights=0.5` counted for every token."""
    batch = packed(sample(advantages=0.5, loss_weights=2.0, policy_versions=9))
    assert batch.advantages.tolist() == [[0, 0.5, 0.5, 0, 0, 0, 0, 0]]
    assert batch.loss_weights.tolist() == [[0, 2, 2, 0, 0, 0, 0, 0]]
    assert batch.policy_versions.tolist() == [[0, 9, 9, 0, 0, 0, 0, 0]]


def test_what_stays_as_it_was():
    """The conversion takes what arrays may hold: NaN and inf, 16 bits, integers beside floats."""
    found = packed(sample(extras={"a": [INF, NAN]}), sample(extras={"a": [1, 2]})).extras["a"]
    assert found.dtype == np.float32
    held = np.sort(found[found != 0])
    np.testing.assert_array_equal(held, np.array([1, 2, INF, NAN], np.float32), equal_nan=True)
    half = packed(sample(extras={"a": np.ones(2, np.float16)})).extras["a"]
    assert half.dtype == np.float16
    assert (
        packed(sample(extras={"a": np.array([2**31 - 1, -(2**31)])})).extras["a"].max() == 2**31 - 1
    )


VERSIONS = [{"version": "8", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 3}]


def test_versions_of_sglang():
    """Its spans over output tokens were dropped."""
    triples = [(-0.5, i, None) for i in (7, 8, 9)]
    found = sglang(output_token_logprobs=triples, weight_versions=VERSIONS)
    assert found.policy_versions == [8, 9, 9]
    numbers = [{**span, "version": int(span["version"])} for span in VERSIONS]
    assert sglang(output_token_logprobs=triples, weight_versions=numbers).policy_versions == [
        8,
        9,
        9,
    ]
    default = [{"version": "default", "start": 0, "end": 3}]
    assert sglang(output_token_logprobs=triples, weight_versions=default).policy_versions is None
    first = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": triples,
        "weight_versions": VERSIONS,
    }
    second = first | {"weight_versions": [{"version": 10, "start": 0, "end": 3}]}
    turns = [
        {"input_ids": [5], "meta_info": first},
        {"input_ids": [5, 7, 8, 9, 1, 2], "meta_info": second},
    ]
    two = Sample.from_sglang(turns)
    assert np.asarray(two.policy_versions)[two.mask[1:] > 0].tolist() == [8, 9, 9, 10, 10, 10]
    assert Sample.from_sglang(turns, policy_versions=3).policy_versions.tolist() == [3] * 8


@pytest.mark.parametrize("given", [[8, 9], np.array([8, 9]), [8, 8, 9, 9, 9], jnp.array([8, 9])])
def test_versions_of_turns(given):
    found = Sample.from_vllm([turn([5], [6, 7]), turn([5, 6, 7, 1], [8, 4])], policy_versions=given)
    assert np.asarray(found.policy_versions).tolist() == [8, 8, 9, 9, 9]
    assert RolloutBatch.from_samples([found], row_length=8).policy_versions.tolist() == [
        [8, 8, 9, 9, 9, 0, 0, 0]
    ]


def test_fields_that_an_output_lacks_may_be_given():
    """They were replaced by None."""
    found = vllm({"rollout_log_probs": [-1.0, -2.0], "nucleus": [[7], [8]]})
    assert found.rollout_log_probs == [-1.0, -2.0]
    assert found.nucleus == [[7], [8]]

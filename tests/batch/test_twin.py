"""Two batches of the same responses behind other prompts: places, losses and gradients against
loops over samples.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import other_losses
from oracle.head import log_softmax

from jaxppo import (
    SFT,
    Head,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    accumulate_gradients,
    advantages,
    compute_log_probs,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from jaxppo.batch.extras import Extra
from jaxppo.losses import preference
from jaxppo.losses.distillation import distillation_loss
from sharding import make_parallel_mesh, scan_affine, shift_left
from sharding.testing import assert_trees_close

LAYOUTS = ["contiguous", "zigzag", "striped"]
T, V, H = 24, 13, 6
LENGTHS = [(2, 5, 3), (4, 1, 5), (1, 6, 1), (3, 3, 4), (2, 4, 0), (5, 7, 2)]


def pairs(lengths, seed=0):
    """A sample and its twin for each (prompt, the twin's prompt, response); some response tokens
    carry no loss.
    """
    rng = np.random.default_rng(seed)

    def sample(prompt, response, trains):
        tokens = np.concatenate([rng.integers(1, V, prompt), response])
        extras = {
            "seen": Extra(tokens, at="input", fill=-1),
            "own": Extra(rng.normal(size=len(response)), fill=-7),
        }
        values = {"reward": rng.normal(), "rollout_log_probs": -rng.exponential(size=len(response))}
        return Sample(tokens, prompt, loss_mask=[*[0] * prompt, *trains], extras=extras, **values)

    made = []
    for prompt, other, count in lengths:
        response = rng.integers(1, V, count)
        trains = rng.random(count) < 0.8
        made.append((sample(prompt, response, trains), sample(other, response, trains)))
    return [list(x) for x in zip(*made, strict=True)]


def rows(x):
    """The rows of all micro-batches."""
    return np.asarray(x).reshape(-1, np.shape(x)[-1])


def places_of(batch, number):
    """The row of a sample, and the places of its tokens there, in their order."""
    (found,) = np.argwhere(rows(batch.sample_ids) == number)
    row, slot = found.tolist()
    (at,) = np.nonzero(rows(batch.segment_ids)[row] == slot + 1)
    return row, at[np.argsort(rows(batch.positions)[row, at])]


def by_sample(batch, x, samples):
    """The values of the positions that predict the response tokens, by sample."""
    each = [places_of(batch, i) for i in range(len(samples))]
    return [rows(x)[row, at[s.start - 1 : -1]] for s, (row, at) in zip(samples, each, strict=True)]


PACKINGS = [
    {},
    {"micro_batches": 2},
    {"rows": 8},
    {"max_tokens": T},
    {"buckets": (2, 4, 8), "num_segments": 8},
]


@pytest.mark.filterwarnings("ignore:RolloutBatch.from_samples. got batches of 3 shapes")
@pytest.mark.parametrize("layout", [*LAYOUTS, "zigzag_per_segment"])
@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=8
    ),
    st.sampled_from(PACKINGS),
)
def test_a_response_has_the_same_places_in_both(layout, lengths, packing):
    parallel = make_parallel_mesh(
        "dp=2,tp=4" if layout == "zigzag_per_segment" else "dp=2,cp=2,tp=2", context_layout=layout
    )
    samples, others = pairs(lengths)
    batches = RolloutBatch.from_samples(
        samples, row_length=T, parallel=parallel, **packing, twin=others
    )
    for batch, given_ in zip(batches, (samples, others), strict=True):
        batch.validate(V)
        assert (rows(batch.segment_ids) > 0).sum() == sum(len(s.tokens) for s in given_)
        for i, s in enumerate(given_):
            row, at = places_of(batch, i)
            assert rows(batch.tokens)[row, at].tolist() == s.tokens.tolist()
            assert rows(batch.extras["seen"])[row, at].tolist() == s.tokens.tolist()
            assert rows(batch.positions)[row, at].tolist() == list(range(len(at)))
            assert rows(batch.rewards)[rows(batch.sample_ids) == i] == np.float32(s.reward)
        for name, theirs in (
            ("own", [s.extras["own"].values for s in given_]),
            ("mask", [s.mask for s in given_]),
        ):
            mine = by_sample(
                batch, batch.loss_mask if name == "mask" else batch.extras[name], given_
            )
            for x, y, s in zip(mine, theirs, given_, strict=True):
                np.testing.assert_array_equal(x, y[s.start :] if name == "mask" else y)
        for got, s in zip(by_sample(batch, batch.rollout_log_probs, given_), given_, strict=True):
            np.testing.assert_allclose(got, s.rollout_log_probs, rtol=1e-6)
    first, twin = batches
    np.testing.assert_array_equal(first.loss_mask, twin.loss_mask)
    np.testing.assert_array_equal(first.sample_ids, twin.sample_ids)
    for i, (sample, other) in enumerate(zip(samples, others, strict=True)):
        (row, at), (row_of_twin, at_of_twin) = (places_of(batch, i) for batch in batches)
        assert row == row_of_twin
        # from the last token of the prompt on, which predicts the first of the response
        np.testing.assert_array_equal(at[sample.start - 1 :], at_of_twin[other.start - 1 :])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functions_along_rows_stop_at_the_padding_between_samples(layout):
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    samples, others = pairs(LENGTHS)
    batches = RolloutBatch.from_samples(samples, row_length=T, parallel=parallel, twin=others)
    for batch, given_ in zip(batches, (samples, others), strict=True):
        where = {"segment_ids": batch.segment_ids, "num_segments": batch.num_segments}
        np.testing.assert_array_equal(shift_left(batch.tokens, parallel, **where), batch.targets)
        found = scan_affine(0.5, batch.rollout_log_probs, parallel, **where)
        for got, s in zip(by_sample(batch, found, given_), given_, strict=True):
            expected = [0.0]
            for value in s.rollout_log_probs[::-1]:
                expected.append(value + 0.5 * expected[-1])
            np.testing.assert_allclose(got, expected[:0:-1], rtol=1e-5)


def parameters(seed):
    rng = np.random.default_rng(seed)
    shapes = {"table": (V, H), "places": (T, H), "head": (H, V)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def model(params, batch):
    """Attention with equal weights, along the paths of the batch."""
    seen = batch.paths.attends(batch.paths).astype(jnp.float32)
    return (
        seen
        / seen.sum(-1, keepdims=True)
        @ (params["table"][batch.tokens] + params["places"][batch.positions])
    )


CONFIG = PolicyLossConfig()
COEF = 0.5


@functools.cache
def program(parallel):
    """The log-probs of a student and of a teacher, both losses of the student, and the gradient
    of their sum.
    """

    def score(params, batch):
        where = batch.loss_mask > 0
        return log_probs_from_hidden(
            model(params, batch), params["head"], batch.targets, where=where, parallel=parallel
        )

    def losses(student, part):
        batch, hidden, teacher, whole = part
        states = model(student, batch), student["head"]
        taught, of_taught = distillation_loss(
            *states, hidden, teacher, batch, normalizer=whole["taught"], parallel=parallel
        )
        policy, of_policy = policy_loss_from_hidden(
            *states, batch, CONFIG, normalizer=whole["policy"], parallel=parallel
        )
        return taught + COEF * policy, {"taught": of_taught["loss"], "policy": of_policy["loss"]}

    @jax.jit
    def run(student, teacher, batches, twins):
        own = compute_log_probs(score, student, batches).log_probs
        theirs = compute_log_probs(score, teacher, twins).log_probs
        pull = advantages.on_policy_distillation(
            jnp.zeros_like(own), own, theirs, batches.loss_mask
        )
        batches = dataclasses.replace(batches, old_log_probs=own, advantages=pull)
        whole = Normalizer.of({"taught": SFT(), "policy": CONFIG}, batches, parallel=parallel)
        hidden = jax.lax.stop_gradient(jax.vmap(functools.partial(model, teacher))(twins))
        heads = jnp.broadcast_to(teacher["head"], (len(own), H, V))
        step = accumulate_gradients(losses, (batches, hidden, heads, whole))
        (_, metrics), gradients = step(student)
        return own, theirs, finalize_metrics(metrics), gradients

    return run


def hidden_of(params, tokens):
    """What each token of one sample reads, float64 `[n, H]`."""
    x = params["table"].astype(np.float64)[tokens] + params["places"][: len(tokens)]
    return x.cumsum(0) / np.arange(1, len(tokens) + 1)[:, None]


def oracle(student, teacher, samples, others):
    """Both losses, and the gradient of their sum, sample by sample."""
    count = sum(s.mask.sum() for s in samples)
    losses = {"taught": 0.0, "policy": 0.0}
    gradients = {name: np.zeros(x.shape) for name, x in student.items()}
    for sample, other in zip(samples, others, strict=True):
        hidden, theirs = (
            hidden_of(params, s.tokens)[s.start - 1 : -1]
            for params, s in ((student, sample), (teacher, other))
        )
        z, q = (
            h @ params["head"].astype(np.float64)
            for h, params in ((hidden, student), (theirs, teacher))
        )
        mask = sample.mask[sample.start :]
        at = np.arange(len(z))
        response = sample.tokens[sample.start :]
        divergence, dz = other_losses.divergence(z, q)
        advantage = log_softmax(q)[at, response] - log_softmax(z)[at, response]
        losses["taught"] += (mask * divergence).sum() / count
        losses["policy"] -= (mask * advantage).sum() / count  # the ratio is 1
        likelier = np.eye(V)[response] - np.exp(log_softmax(z))
        dz = mask[:, None] * (dz - COEF * advantage[:, None] * likelier) / count
        gradients["head"] += hidden.T @ dz
        for t, dh in enumerate(dz @ student["head"].astype(np.float64).T, sample.start - 1):
            np.add.at(gradients["table"], sample.tokens[: t + 1], dh / (t + 1))
            gradients["places"][: t + 1] += dh / (t + 1)
    return losses, gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_student_and_its_teacher_against_the_oracle_and_each_batch_alone(layout):
    """Two micro-batches on dp=2,cp=2,tp=2.

    If prompts began at one place, the policy loss would be -3.2, not -0.16.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    samples, others = pairs(LENGTHS, seed=1)
    options = {
        "row_length": T,
        "rows": 2,
        "micro_batches": 2,
        "num_segments": 4,
        "parallel": parallel,
    }
    batch, twin = RolloutBatch.from_samples(samples, **options, twin=others)
    student = parameters(0)
    teacher = parameters(1)

    _, _, losses, gradients = program(parallel)(student, teacher, batch, twin)
    expected, expected_gradients = oracle(student, teacher, samples, others)
    assert_trees_close(losses, {name: np.float64(x) for name, x in expected.items()}, rtol=1e-5)
    assert_trees_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)

    for ours, given_ in ((batch, samples), (twin, others)):
        alone = RolloutBatch.from_samples(given_, **options)
        # each run to its end: two at once may wait for each other's devices
        found = jax.block_until_ready(program(parallel)(student, teacher, ours, ours))
        wanted = jax.block_until_ready(program(parallel)(student, teacher, alone, alone))
        for mine, theirs in zip(found[:2], wanted[:2], strict=True):
            each = zip(by_sample(ours, mine, given_), by_sample(alone, theirs, given_), strict=True)
            for (a, b), s in zip(each, given_, strict=True):
                np.testing.assert_allclose(
                    a, np.where(s.mask[s.start :] > 0, b, a), rtol=1e-5, atol=1e-6
                )
        assert_trees_close(found[2:], wanted[2:], rtol=1e-4, atol=1e-5)


def test_a_twin_on_devices():
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout="zigzag")
    samples, others = pairs(LENGTHS)
    for batch in RolloutBatch.from_samples(samples, row_length=T, parallel=parallel, twin=others):
        jax.tree.map(np.testing.assert_array_equal, batch.put(parallel), batch)


ONE = Sample([5, 6, 7, 8], 2)
OTHER = Sample([9, 5, 6, 7, 8], 3)
PER_SEGMENT = {"context_layout": "zigzag_per_segment"}


@pytest.mark.parametrize(
    ("twin", "options", "message"),
    [
        (OTHER, {}, "twin: got Sample, expected a sequence of Sample"),
        ([], {}, "twin: got none, expected at least one"),
        ([OTHER, "a sample"], {}, r"twin\[1\]: got str, expected Sample"),
        ([OTHER], {}, "twin: got 1 samples, expected 2, one for each of samples"),
        (
            [OTHER, Sample([5, 6, 7], 2)],
            {},
            r"twin: got a response of 1 tokens in sample 1, .* samples\[1\], 2 tokens",
        ),
        (
            [OTHER, Sample([5, 6, 7, 9], 2)],
            {},
            "twin: got 9 as response token 1 of sample 1, expected 8, as in",
        ),
        (
            [OTHER, dataclasses.replace(OTHER, sample_id=7)],
            {},
            "twin: got sample_id 7 in sample 1, expected None",
        ),
        (
            [OTHER, OTHER],
            {"share_prefixes": True},
            "share_prefixes: got True, expected False with a twin",
        ),
        (
            [OTHER, OTHER],
            {"parallel": PER_SEGMENT},
            "parallel: got context layout 'zigzag_per_segment' with a twin",
        ),
        (
            [OTHER, Sample([*[1] * 20, 7, 8], 20)],
            {},
            "sequences: got 22 tokens .* expected at most row_length=16",
        ),
    ],
)
def test_refusals(twin, options, message):
    if "parallel" in options:
        options = {"parallel": make_parallel_mesh("cp=4,tp=2", **options["parallel"])}
    with pytest.raises((TypeError, ValueError), match=message):
        RolloutBatch.from_samples([ONE, ONE], row_length=16, **options, twin=twin)


def test_pairs_have_no_twin():
    pair = preference.samples_of_pairs([[1]], chosen=[[3, 4]], rejected=[[6]])
    with pytest.raises(
        TypeError, match="twin: got one in micro_batches_of_pairs, expected it in RolloutBatch"
    ):
        preference.micro_batches_of_pairs(pair, 1, row_length=8, twin=pair)


QUESTIONS, STEPS, DECAY = 6, 25, 0.9


@jax.jit
def taught(student, teacher, batch, twin):
    """One update towards a teacher that follows the student. Heads are all that is learned."""

    def hidden(batch):
        seen = batch.paths.attends(batch.paths).astype(jnp.float32)
        return seen / seen.sum(-1, keepdims=True) @ jax.nn.one_hot(batch.tokens, 2 * QUESTIONS)

    def loss(student):
        own = Head(student, layout="hv")
        others = jax.lax.stop_gradient(Head(teacher, layout="hv"))
        return distillation_loss(
            hidden(batch), own, hidden(twin), others, batch, divergence="forward_kl"
        )[0]

    student = student - 12.0 * jax.grad(loss)(student)
    return student, DECAY * teacher + (1 - DECAY) * student


@pytest.mark.parametrize("hints", [True, False])
def test_a_student_learns_what_only_its_teacher_is_told(hints):
    """Question i has the answer n + i.

    The model can repeat a token that it sees; the student never sees an answer.

    A teacher's prompt is the question, the answer and the question again: at a wrong place there is
    nothing to learn.
    """
    n = QUESTIONS
    rng = np.random.default_rng(0)
    student = np.diag([0.0] * n + [12.0] * n).astype(np.float32)  # [token seen, next token]
    teacher = student
    for _ in range(STEPS):
        p = np.exp(log_softmax(np.asarray(student, np.float64)[:n]))
        drawn = [int(rng.choice(2 * n, p=row)) for row in p]
        samples = [Sample([i, drawn[i]], 1) for i in range(n)]
        told = rng.integers(1, 4, n) if hints else [0] * n  # how often a teacher is told the answer
        hinted = [Sample([i, *[n + i] * told[i], i, drawn[i]], told[i] + 2) for i in range(n)]
        packing = {"row_length": 8, "rows": n, "num_segments": n, "twin": hinted}
        student, teacher = taught(student, teacher, *RolloutBatch.from_samples(samples, **packing))
    answers = np.exp(log_softmax(np.asarray(student, np.float64)[:n]))[
        np.arange(n), n + np.arange(n)
    ]
    assert (answers > 0.8).all() if hints else (answers < 0.1).all(), answers  # 1/12 at the start

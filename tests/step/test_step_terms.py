"""A `StepTerm` is a function of means over the whole step: against f64 numpy on all tokens at once,
gradient included.

"Before, x for y": the mean of the micro-batches' values gave x, and y is right.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxppo import ShardAxes, accumulate_gradients, finalize_metrics, make_parallel_mesh
from jaxppo.sharding.testing import assert_trees_close
from jaxppo.step.terms import StepTerm

K, R, T, H, E = 4, 4, 8, 6, 5
RNG = np.random.default_rng(0)
X = (
    RNG.normal(size=(K, R, T, H)).astype(np.float32)
    + np.linspace(-1, 1, K, dtype=np.float32)[:, None, None, None]
)
ROUTER = RNG.normal(size=(H, E)).astype(np.float32)
# uneven micro-batches: 8, 16, 24 and 32 tokens that were read
READ = (np.arange(R * T).reshape(R, T) < 8 * np.arange(1, K + 1)[:, None, None]).astype(np.float32)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def oracle(router, which):
    """The balance term and its gradient, in f64, over all read tokens of the step at once."""
    x = X.astype(np.float64)[READ > 0]
    scores = softmax(x @ router.astype(np.float64))
    score = scores.mean(0)
    if which == "balance":  # E sum(share of tokens whose largest score is e * mean score of e)
        used = np.eye(E)[scores.argmax(-1)].mean(0)
        value = E * np.sum(used * score)
        by_score = E * used
    else:  # the entropy of the mean scores, which is no product
        value, by_score = -np.sum(score * np.log(score)), -(np.log(score) + 1)
    by_logit = scores * (by_score - (scores * by_score).sum(-1, keepdims=True)) / len(x)
    return value, x.T @ by_logit


def balance(means):
    return E * jnp.sum(means["used"] * means["score"])


def entropy(means):
    return -jnp.sum(means["score"] * jnp.log(means["score"]))


FUNCTIONS = {"balance": balance, "entropy": entropy}


def sums(router, x, read):
    scores = jax.nn.softmax(jnp.dot(x, router, precision="highest"))
    used = jax.nn.one_hot(jnp.argmax(scores, -1), E)
    return {
        "used": jnp.sum(used * read[..., None], (0, 1)),
        "score": jnp.sum(scores * read[..., None], (0, 1)),
    }


def step(fn, router, x, read, axes=None):
    """Value, metric and gradient of a step of micro-batches."""

    def of(router, x, read):
        own = sums(router, x, read)
        return own if axes is None else lax.psum(own, axes.tokens)

    counts = read.sum((1, 2))
    counts = counts if axes is None else lax.psum(counts, axes.tokens)
    before = lax.map(lambda part: of(router, *part), (x, read))
    term = StepTerm.of(fn, before, counts)

    def loss_fn(router, part):
        x, read, term = part
        return term.of_part(of(router, x, read)), {"term": term.metric}

    (loss, metrics), gradient = accumulate_gradients(loss_fn, (x, read, term), parallel=axes)(
        router
    )
    return loss, finalize_metrics(metrics)["term"], gradient


@pytest.mark.parametrize("which", FUNCTIONS)
def test_the_value_and_gradient_are_those_of_all_tokens_at_once(which):
    """The balance: before, 2.012 for 1.181, and a gradient that was 2.5 times its size off:
    uneven parts, far apart.
    """
    value, gradient = oracle(ROUTER, which)
    loss, reported, found = jax.jit(partial(step, FUNCTIONS[which]))(ROUTER, X, READ)
    np.testing.assert_allclose([loss, reported], [value, value], rtol=1e-6)
    assert_trees_close(found, jnp.asarray(gradient, jnp.float32), rtol=1e-5, atol=1e-5)

    def of_one(router, x, read):  # the mean of the micro-batches' values, which is another number
        of = jax.tree.map(lambda s: s / read.sum(), sums(router, x, read))
        return FUNCTIONS[which](of) / K

    @jax.jit
    @jax.value_and_grad
    def means(router):
        return sum(of_one(router, x, read) for x, read in zip(X, READ, strict=True))

    mean_of_means, of_means = means(ROUTER)
    assert abs(mean_of_means - value) > 0.02
    assert np.linalg.norm(of_means - gradient) > 0.1 * np.linalg.norm(gradient)


@pytest.mark.parametrize("mesh", ["dp=4,cp=2,tp=1", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("how", ["whole arrays", "shard_map"])
def test_on_meshes(mesh, how):
    parallel = make_parallel_mesh(mesh)
    x, read = (
        jax.device_put(a, parallel.sharding(P(None, *parallel.tokens_spec))) for a in (X, READ)
    )
    router = jax.device_put(ROUTER, parallel.sharding(P()))
    run = partial(step, FUNCTIONS["balance"])
    if how == "shard_map":
        axes = ShardAxes(data="dp", context="cp", tensor="tp")
        spec = P(None, "dp", "cp")
        run = jax.shard_map(
            partial(run, axes=axes), mesh=parallel.mesh, in_specs=(P(), spec, spec), out_specs=P()
        )
    value, gradient = oracle(ROUTER, "balance")
    loss, reported, found = jax.jit(run)(router, x, read)
    np.testing.assert_allclose([loss, reported], [value, value], rtol=1e-6)
    assert_trees_close(np.asarray(found), gradient.astype(np.float32), rtol=1e-5, atol=1e-5)


def test_micro_batches_cut_another_way():
    """One micro-batch, or eight: the same numbers."""
    run = jax.jit(partial(step, FUNCTIONS["balance"]))
    expected = run(ROUTER, X, READ)
    for count in (1, 8):
        got = run(ROUTER, X.reshape(count, -1, T, H), READ.reshape(count, -1, T))
        assert_trees_close(got, expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_read():
    """Means of nothing are 0, and so are a product of them and its gradient."""
    loss, _, gradient = step(FUNCTIONS["balance"], ROUTER, X, 0 * READ)
    assert loss == 0
    assert not gradient.any()


BEFORE = {"used": jnp.ones((K, E)), "score": jnp.ones((K, E))}
COUNTS = jnp.ones(K)


def test_what_is_refused():
    product = FUNCTIONS["balance"]
    term = StepTerm.of(FUNCTIONS["balance"], BEFORE, COUNTS)
    one = jax.tree.map(lambda x: x[0], term)
    own = {"used": jnp.ones(E), "score": jnp.ones(E)}
    for call, error, message in (
        (lambda: StepTerm.of(3, BEFORE, COUNTS), TypeError, "fn: got int, expected a function"),
        (
            lambda: StepTerm.of(lambda m: m["used"], BEFORE, COUNTS),
            TypeError,
            r"fn: got a result of shape \(5,\)",
        ),
        (
            lambda: StepTerm.of(product, BEFORE, COUNTS[None]),
            ValueError,
            r"counts: got shape \(1, 4\), expected \[K\]",
        ),
        (
            lambda: StepTerm.of(product, BEFORE, COUNTS[:2]),
            ValueError,
            r"sums\['score'\]: got shape \(4, 5\), expected",
        ),
        (
            lambda: StepTerm.of(product, {"used": [1.0]}, COUNTS),
            TypeError,
            r"sums\['used'\]\[0\]: got float, expected",
        ),
        (
            lambda: term.of_part(own),
            ValueError,
            r"term: got value of shape \(4,\), expected that of one micro-batch",
        ),
        (
            lambda: one.of_part({"used": jnp.ones(E)}),
            ValueError,
            "sums: got PyTreeDef.*, expected those of the first",
        ),
        (
            lambda: one.of_part(own | {"used": jnp.ones(3)}),
            ValueError,
            r"sums\['used'\]: got shape \(3,\), expected",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_terms_of_another_step_and_inside_of_one():
    term = StepTerm.of(FUNCTIONS["balance"], BEFORE, COUNTS)
    own = {"used": jnp.ones(E), "score": jnp.ones(E)}
    half = jax.tree.map(lambda x: x[:2], term)
    with pytest.raises(ValueError, match="term: got one of 4 micro-batches, expected one of 2"):
        accumulate_gradients(lambda w, term: (w * term.of_part(own), {}), half)(jnp.ones(()))

    def inside(w, x):
        return w * StepTerm.of(jnp.sum, x[None], jnp.ones(1)).of_part(x), {}

    with pytest.raises(
        ValueError, match=r"StepTerm\.of: got one micro-batch inside accumulate_gradients"
    ):
        accumulate_gradients(inside, jnp.ones((2, 3)))(jnp.ones(()))

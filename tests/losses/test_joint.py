"""Several losses of one batch in one pass: the sum of the losses computed alone, on every path."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import OracleHead, OracleSample, other_losses
from oracle.head import HeadGradient, head_gradient, id_gradient, id_log_probs, log_softmax, logits
from oracle.samples import sample_weights
from oracle.step import through_head, with_stats
from policy_steps import quick_jit, step_of, with_garbage

from jaxppo import (
    GSPO,
    SFT,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    TokenLoss,
    TokenStats,
    Value,
    accumulate_gradients,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_hidden,
    loss_from_stats,
    policy_loss_from_hidden,
)
from jaxppo.losses import Part, ReferenceKL, TopKDistillation
from jaxppo.policy_losses import KLCov
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.audit.program import notes
from sharding.testing import assert_trees_close

H, V, K = 8, 50, 4
POLICY = PolicyLossConfig(
    entropy_coef=0.01,
    aggregation="sequence_mean_token_mean",
    off_policy=OffPolicyConfig(weights="token", high=1.05, batch_normalize=True),
)
PARTS = {
    "policy": Part(POLICY, mask="even"),
    "written": Part(SFT(label_smoothing=0.1, z_loss=1e-3), coef=0.3, mask="odd"),
    "near": Part(ReferenceKL("k2", aggregation="rollout_mean"), coef=0.2, weights="own"),
    "taught": Part(
        TopKDistillation("mixed_kl", 0.3, aggregation="sequence_mean_token_sum"),
        coef=0.4,
        mask="third",
    ),
}
PATHS = {
    "one pass": {"memory": 2**30},
    "two passes": {"memory": 25_000},
    "micro-batches": {"memory": 2**30, "micro_batches": 2},
    "mesh": {"memory": 2**30, "mesh": "dp=2,cp=2,tp=2"},
}


def step(mesh=None, micro_batches=None):
    """The batch, its parts' masks and weights by name, and hidden states and kernel.

    Even samples have the policy loss, odd ones are written answers, all have the weighted
    divergence, and every third has a teacher.
    """
    parallel = mesh and make_parallel_mesh(mesh)
    rows = 4 if micro_batches is None else 2
    batch = RolloutBatch.from_samples(
        step_of(0, 12),
        row_length=32,
        rows=rows,
        micro_batches=micro_batches,
        num_segments=8,
        parallel=parallel,
    )
    segments = np.asarray(batch.segment_ids)
    owners = np.take_along_axis(np.asarray(batch.sample_ids), np.maximum(segments - 1, 0), -1)
    of = {"policy": owners % 2 == 0, "written": owners % 2 == 1, "taught": owners % 3 == 0}
    masks = {name: batch.loss_mask * here for name, here in of.items()}
    weights = {"near": np.where(batch.loss_mask > 0, 0.5 + owners % 3, np.nan).astype(np.float32)}
    batch = with_garbage(batch, np.nan)
    # an array may hold garbage at tokens where no part that reads it has loss
    advantages = np.where(masks["policy"] > 0, batch.advantages, np.nan)
    keys = jax.random.split(jax.random.key(0))
    # the same for a token wherever it lies
    by_token = np.asarray(jax.random.normal(keys[0], (12, 32, H)))
    at = owners, np.asarray(batch.positions)
    hidden = np.where(segments[..., None] > 0, by_token[at], np.nan)
    taught = masks["taught"][..., None] > 0
    extras = {
        "even": masks["policy"],
        "odd": masks["written"] > 0,
        "third": masks["taught"].astype(np.int8),
        "own": weights["near"],
        "teacher_ids": np.where(taught, TEACHER[0][at], 10**6),
        "teacher_log_probs": np.where(taught, TEACHER[1][at], np.nan),
    }
    given = {"masks": masks, "weights": weights}
    params = {
        "hidden": hidden.astype(np.float32),
        "kernel": 0.3 * jax.random.normal(keys[1], (H, V)),
    }
    return dataclasses.replace(batch, advantages=advantages, extras=extras), given, params, parallel


def teacher():
    """The likeliest ids of a teacher at each token, and their log-probs; one is missing at every
    other position.
    """
    log_q = log_softmax(np.random.default_rng(1).normal(size=(12 * 32, V)) * 2).reshape(12, 32, V)
    ids = np.argsort(-log_q, axis=-1)[..., :K].astype(np.int32)
    log_q = np.take_along_axis(log_q, ids, axis=-1).astype(np.float32)
    ids[:, ::2, -1] = -1
    return ids, log_q


TEACHER = teacher()


def expected_of():
    """What the oracles of the parts say: the sum, its gradients by hidden states and kernel,
    metrics of each part.
    """
    batch, given, params, _ = step()
    names = ("targets", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
    arrays = {name: by_token(getattr(batch, name), batch) for name in names}
    arrays["hidden"] = by_token(params["hidden"], batch)
    rollouts = {
        int(i): int(r) for i, r in zip(batch.sample_ids.flat, batch.rollout_ids.flat, strict=True)
    }
    head = OracleHead(params["kernel"])

    def samples(name):
        mask = by_token(given["masks"].get(name, batch.loss_mask), batch)
        weights = by_token(given["weights"].get(name, np.ones_like(batch.loss_mask)), batch)
        for i in range(12):
            own = {key: x[i] for key, x in arrays.items()}
            yield OracleSample(mask[i], loss_weights=weights[i], rollout_id=rollouts[i], **own)

    off = {"weights": "token", "high": 1.05, "batch_normalize": True}
    config = {"entropy_coef": 0.01, "aggregation": POLICY.aggregation, "off_policy": off}
    found = {"policy": oracle.policy_loss_from_hidden([*samples("policy")], head, config)}
    loss, cotangents, metrics = other_losses.sft_loss(
        with_stats(written := [*samples("written")], head), label_smoothing=0.1, z_loss=1e-3
    )
    found["written"] = (loss, metrics), *through_head(written, head, cotangents)
    kl = {"coef": 1.0, "estimator": "k2"}
    none = [dataclasses.replace(s, advantages=np.zeros(32)) for s in samples("near")]
    config = {"loss": "reinforce", "kl": kl, "ratio_to": "current", "aggregation": "rollout_mean"}
    found["near"] = oracle.policy_loss_from_hidden(none, head, config)
    found["taught"] = taught([*samples("taught")], head)
    metrics = {
        n: {"loss": x.loss} | x.metrics if hasattr(x, "loss") else {"loss": x[0]} | x[1]
        for n, (x, *_) in found.items()
    }
    total = sum(PARTS[n].coef * its["loss"] for n, its in metrics.items())
    gradient = {
        "hidden": sum(PARTS[n].coef * np.stack(x[1]) for n, x in found.items()),
        "kernel": sum(PARTS[n].coef * x[2].kernel for n, x in found.items()),
    }
    return total, metrics, gradient


def taught(samples, head):
    """Loss and divergence, gradients by hidden states and head, of the part that distils."""
    weights = sample_weights(samples, "sequence_mean_token_sum")
    values = [np.zeros(0)]
    by_hidden = []
    by_head = []
    loss = 0.0
    for i, (s, w) in enumerate(zip(samples, weights, strict=True)):
        hidden, (ids, log_q) = s.at("hidden"), (x[i][s.here] for x in TEACHER)
        z = logits(hidden, head)
        log_p = id_log_probs(z, ids)
        g = np.zeros(ids.shape)
        own = np.zeros(len(ids))
        for t, k in enumerate(ids >= 0):
            own[t], g[t, k] = other_losses.top_k_divergence(
                log_p[t, k], log_q[t, k], "mixed_kl", 0.3
            )
        dh, dw = head_gradient(hidden, head, id_gradient(z, ids, w * g))
        by_hidden.append(s.scatter(dh))
        by_head.append(dw.kernel)
        values.append(own)
        loss += w * own.sum()
    return (
        (loss, {"divergence": np.concatenate(values).mean()}),
        by_hidden,
        HeadGradient(sum(by_head), *[None] * 3),
    )


def by_token(x, batch):
    """`[samples, positions, ...]`, wherever the tokens lie."""
    out = np.zeros((12, 32, *np.shape(x)[batch.tokens.ndim :]), np.float32)
    x, segments, positions = (
        np.asarray(a).reshape(-1, *a.shape[batch.tokens.ndim - 1 :])
        for a in (x, batch.segment_ids, batch.positions)
    )
    samples = np.asarray(batch.sample_ids).reshape(-1, batch.num_segments)
    rows, columns = np.nonzero(segments)
    out[samples[rows, segments[rows, columns] - 1], positions[rows, columns]] = x[rows, columns]
    return out


@functools.cache
def compiled(path):
    """A compiled function of (params, batch): the loss of all parts, its metrics and gradients."""
    options = dict(PATHS[path])
    mesh = options.pop("mesh", None)
    parallel = mesh and make_parallel_mesh(mesh)
    options.pop("micro_batches", None)

    def loss_of(params, batch, normalizer=None):
        more = {"normalizer": normalizer, "parallel": parallel, **options}
        return loss_from_hidden(params["hidden"], params["kernel"], batch, PARTS, **more)

    def slopes_of(params, batch):
        if batch.micro_batches is None:
            return jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        normalizer = Normalizer.of(PARTS, batch, parallel=parallel)

        def part(params, step):
            here, *rest = step
            own = jnp.where(here[:, None, None, None] > 0, params["hidden"], 0).sum(axis=0)
            return loss_of(params | {"hidden": own}, *rest)

        return accumulate_gradients(part, (jnp.eye(batch.micro_batches), batch, normalizer))(params)

    @quick_jit
    def run(params, batch):
        (loss, found), gradient = slopes_of(params, batch)
        return loss, finalize_metrics(found), gradient

    return run


@pytest.mark.every(5)
@pytest.mark.parametrize("path", PATHS)
def test_the_sum_of_the_parts(path):
    batch, _, params, _ = step(PATHS[path].get("mesh"), PATHS[path].get("micro_batches"))
    loss, numbers, gradient = compiled(path)(params, batch)
    total, metrics, expected = expected_of()
    np.testing.assert_allclose(loss, total, rtol=2e-5)
    assert_trees_close(numbers.pop("loss"), loss)
    for name, its in metrics.items():
        compared = {
            "near": {"loss", "kl"},
            "written": {"loss", "nll", "log_z"},
            "taught": {"loss", "divergence"},
        }
        for what in compared.get(name, {"loss", "pg_loss", "entropy", "tis", "ratio_max"}):
            found = numbers[f"{name}/{what}"]
            np.testing.assert_allclose(
                found, its[what], rtol=3e-5, atol=1e-6, err_msg=f"{name}/{what}"
            )
    scale = {k: np.abs(x).max() for k, x in expected.items()}
    np.testing.assert_allclose(
        gradient["kernel"], expected["kernel"], rtol=3e-5, atol=3e-6 * scale["kernel"]
    )
    mine = by_token(gradient["hidden"], batch)
    np.testing.assert_allclose(mine, expected["hidden"], rtol=3e-5, atol=3e-6 * scale["hidden"])
    assert {name.split("/")[0] for name in numbers} == {*PARTS}


def test_three_products_in_place_of_nine():
    batch, _, params, _ = step()

    def joint(p):
        return loss_from_hidden(*p, batch, PARTS)[0]

    def one(p):
        return policy_loss_from_hidden(*p, batch, POLICY)[0]

    given = params["hidden"], params["kernel"]
    found = [audit(jax.grad(fn), given) for fn in (one, joint)]
    assert found[0].flops == found[1].flops
    assert "one pass" in found[1].notes[0]

    def small(p):
        return loss_from_hidden(*p, batch, PARTS, memory=25_000)[0]

    assert "two passes" in notes(jax.make_jaxpr(jax.grad(small))(given))[0]


def test_a_loss_of_sequences_takes_all_parts_to_two_passes():
    batch, given, params, _ = step()
    masks = {name: given["masks"][name] for name in ("policy", "written")}
    of_sequences = PolicyLossConfig(GSPO(0.01, 0.02))
    parts = {
        "policy": Part(of_sequences, mask="even"),
        "written": Part(SFT(), jnp.float32(0.3), mask="odd"),
    }

    def run(p):
        return loss_from_hidden(p["hidden"], p["kernel"], batch, parts)[0]

    loss, gradient = quick_jit(jax.value_and_grad(run))(params)

    def separate(p):
        halves = [dataclasses.replace(batch, loss_mask=masks[name]) for name in parts]
        first = policy_loss_from_hidden(p["hidden"], p["kernel"], halves[0], of_sequences)[0]
        return first + 0.3 * loss_from_hidden(p["hidden"], p["kernel"], halves[1], SFT())[0]

    expected, slope = quick_jit(jax.value_and_grad(separate))(params)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    assert_trees_close(gradient["kernel"], slope["kernel"], rtol=3e-5, atol=1e-6)


def test_a_rule_that_one_part_breaks():
    batch, _, params, _ = step()
    extras = {**batch.extras, "even": batch.loss_mask}  # advantages are NaN on the written samples
    batch = dataclasses.replace(batch, extras=extras)
    loss, found, gradient = compiled("one pass")(params, batch)
    assert np.isnan(loss)
    assert np.isnan(np.asarray(gradient["kernel"])).any()
    bits = {name: int(found[f"{name}/broken_rules"]) for name in PARTS}
    assert bits["written"] == bits["near"] == bits["taught"] == 0
    assert explain_broken_rules(bits["policy"])[0].startswith("advantages: expected finite")


def test_parts_of_statistics():
    """The same sum from log-probs, and a loss of one part is its coefficient times that loss
    alone.
    """
    batch, _, params, _ = step()

    @quick_jit
    def run(params, batch):
        states = params["hidden"], params["kernel"]
        asked = {
            "ids": batch.extras["teacher_ids"],
            "logit_stats": ("log_z", "mean_logit"),
            "entropy": "bonus",
            "where": batch.loss_mask > 0,
        }
        stats = log_probs_from_hidden(*states, batch.targets, **asked)
        losses = PARTS, SFT(), {"written": Part(SFT(), 0.5)}
        return [loss_from_stats(stats, batch, loss) for loss in losses]

    found, alone, half = run(params, batch)
    expected, metrics, _ = compiled("one pass")(params, batch)
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    assert found[1].keys() == metrics.keys()
    np.testing.assert_allclose(half[0], alone[0] / 2, rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Mine(TokenLoss[TokenStats]):
    """A loss of one's own: reads an extra and a field of the batch."""

    power: float = 2.0
    extra: str = "mine"

    def reads(self, stats, batch, segments):
        return {
            **super().reads(stats, batch, segments),
            "advantages": batch.advantages,
            "mine": batch.extras["mine"],
        }

    def terms(self, stats, batch, constants, segments):
        return {
            "pull": batch.extras["mine"] * jnp.abs(stats.log_probs) ** self.power,
            "push": -batch.advantages * stats.log_probs,
        }

    def metrics(self, stats, weighed, constants):
        return {"far": (jnp.abs(stats.log_probs), weighed.batch.loss_mask, "max")}


@pytest.mark.parametrize("path", PATHS)
def test_a_loss_of_your_own(path):
    """Everywhere the same number as in float64; NaN where there is no loss changes nothing,
    elsewhere it has a name.
    """
    options = dict(PATHS[path])
    batch, _, params, parallel = step(options.pop("mesh", None), options.pop("micro_batches", None))
    mine = np.where(batch.loss_mask > 0, np.cos(np.asarray(batch.positions)), np.nan).astype(
        np.float32
    )
    advantages = np.where(batch.loss_mask > 0, np.sin(np.asarray(batch.positions)), np.nan).astype(
        np.float32
    )
    batch = dataclasses.replace(batch, advantages=advantages, extras={"mine": mine})
    loss = Mine()
    kernel = jnp.asarray(params["kernel"])

    def loss_of(kernel, batch, hidden, normalizer=None):
        more = {"normalizer": normalizer, "parallel": parallel, **options}
        return loss_from_hidden(hidden, kernel, batch, loss, **more)

    def run(kernel, batch, hidden):
        if batch.micro_batches is None:
            return jax.value_and_grad(loss_of, has_aux=True)(kernel, batch, hidden)
        given = batch, hidden, Normalizer.of(loss, batch)
        return accumulate_gradients(lambda kernel, part: loss_of(kernel, *part), given)(kernel)

    (value, found), gradient = quick_jit(run)(kernel, batch, params["hidden"])
    here = np.asarray(batch.loss_mask) > 0
    rows = np.asarray(params["hidden"], np.float64)[here]
    targets = np.asarray(batch.targets)[here]
    log_p = log_softmax(rows @ np.asarray(kernel, np.float64))
    own = np.take_along_axis(log_p, targets[:, None], -1)[:, 0]
    n = here.sum()
    np.testing.assert_allclose(
        value, (mine[here] * own**2 - advantages[here] * own).mean(), rtol=2e-5
    )
    slope = (2 * mine[here] * own - advantages[here]) / n
    expected = rows.T @ (slope[:, None] * (np.eye(V)[targets] - np.exp(log_p)))
    np.testing.assert_allclose(gradient, expected, rtol=3e-5, atol=3e-6 * np.abs(expected).max())
    np.testing.assert_allclose(found["far"].value, np.abs(own).max(), rtol=1e-5)


def test_what_a_loss_of_your_own_reads_is_explained():
    batch, _, _, _ = step()
    stats = TokenStats(jnp.where(batch.loss_mask > 0, -1.0, jnp.nan))
    sound = dataclasses.replace(
        batch, advantages=np.ones_like(batch.loss_mask), extras={"mine": batch.loss_mask}
    )
    assert np.isfinite(loss_from_stats(stats, sound, Mine())[0])
    for field, name in (("advantages", "advantages"), ("mine", "another_array")):
        bad = np.full_like(batch.loss_mask, np.nan)
        changed = {"extras": {"mine": bad}} if field == "mine" else {field: bad}
        loss, found = loss_from_stats(stats, dataclasses.replace(sound, **changed), Mine())
        assert np.isnan(loss)
        assert explain_broken_rules(found["broken_rules"].value)[0].startswith(
            f"{name}: expected finite"
        )
    with pytest.raises(ValueError, match=r"stats.log_probs: got shape \(4, 2\)"):
        loss_from_stats(TokenStats(stats.log_probs[:, :2]), sound, Mine())


def test_a_nucleus_is_for_losses_of_a_policy():
    """Before: an SFT part of 3.507 became 1.111, with log-probs that were renormalised over a
    sampler's nucleus.
    """
    batch, _, params, _ = step()
    states = params["hidden"], params["kernel"]
    options = {"nucleus_ids": np.stack([batch.targets, (batch.targets + 1) % V], -1)}
    assert np.isfinite(loss_from_hidden(*states, batch, {"policy": PARTS["policy"]}, **options)[0])
    for loss in (
        SFT(),
        {"policy": PARTS["policy"], "written": PARTS["written"]},
        PARTS["near"].loss,
    ):
        with pytest.raises(
            ValueError,
            match=r"nucleus_ids: got some for .*, expected None but for the losses of a pol",
        ):
            loss_from_hidden(*states, batch, loss, **options)


class Thawed(TokenLoss[TokenStats]):
    """No dataclass: JAX would take equal ones for different."""

    def terms(self, stats, batch, constants, segments):
        return {"nll": -stats.log_probs}


def test_bad_input():
    batch, _, params, _ = step()

    def call(parts=PARTS, normalizer=None, **extras):
        changed = {name: x for name, x in {**batch.extras, **extras}.items() if x is not None}
        given = dataclasses.replace(batch, extras=changed)
        return loss_from_hidden(
            params["hidden"], params["kernel"], given, parts, normalizer=normalizer
        )

    with pytest.raises(ValueError, match="loss: got no parts, expected at least one"):
        call({})
    with pytest.raises(TypeError, match=r"loss: got a part named '', expected a string"):
        call({"": SFT()})
    with pytest.raises(
        TypeError, match=r"loss: got float, expected a PolicyLossConfig, a policy loss, SFT()"
    ):
        Part(0.5)
    with pytest.raises(
        TypeError, match=r"loss: got float, expected a PolicyLossConfig, a policy loss, SFT()"
    ):
        call({"a": 0.5})
    with pytest.raises(TypeError, match="loss: got Thawed, expected a frozen dataclass"):
        call(Thawed())
    with pytest.raises(TypeError, match=r"loss: got Part, expected a PolicyLossConfig"):
        call(Part(SFT()))
    with pytest.raises(ValueError, match=r"loss: got KLCov.*, expected one that selects no tokens"):
        Part(PolicyLossConfig(KLCov()))
    with pytest.raises(ValueError, match="coef: got nan, expected a finite number"):
        Part(SFT(), coef=float("nan"))
    with pytest.raises(
        TypeError, match=r"mask: got ndarray, expected the name of one of batch.extras"
    ):
        Part(SFT(), mask=batch.loss_mask)
    with pytest.raises(
        ValueError,
        match=r"batch.extras: got \['even', .*\], expected 'odd' among them, \[R, T\] for",
    ):
        call(odd=None)
    with pytest.raises(
        ValueError,
        match=r"batch.extras\['own'\]: got shape \(4, 32, 1\), expected the batch's, \(4, 32",
    ):
        call(own=jnp.ones((4, 32, 1)))
    with pytest.raises(
        TypeError,
        match=r"loss: got Value.*, expected one of log-probs; loss_from_stats takes this one",
    ):
        call(Value())
    without = dataclasses.replace(batch, ref_log_probs=None)
    with pytest.raises(
        ValueError, match=r"batch.ref_log_probs: got None, expected f32\[R, T\] for ReferenceKL"
    ):
        loss_from_hidden(params["hidden"], params["kernel"], without, {"a": ReferenceKL()})
    of_another = Normalizer.of(SFT(), batch)
    with pytest.raises(
        ValueError,
        match=r"normalizer: got one of aggregation 'token_mean', expected 'rollout_mean'",
    ):
        call({"near": PARTS["near"]}, normalizer={"near": of_another})
    two = {name: PARTS[name] for name in ("near", "policy")}
    with pytest.raises(
        ValueError,
        match=r"normalizer: got those of \['near'\], expected one of each part, \['near', ",
    ):
        call(two, normalizer={"near": of_another})  # before: 3.119 for 1.486
    with pytest.raises(
        TypeError, match=r"normalizer: got Normalizer, expected Normalizers by the names of parts"
    ):
        call(two, normalizer=of_another)
    distil = {
        "taught": PARTS["taught"],
        "again": TopKDistillation(ids="other", log_probs="teacher_log_probs"),
    }
    ids = batch.extras["teacher_ids"]
    log_q = batch.extras["teacher_log_probs"]
    for parts, extras, message in [
        (PARTS, {"teacher_ids": None}, "batch.extras: got .*, expected 'teacher_ids' among them"),
        (
            distil,
            {"other": ids},
            r"ids: got \['other', 'teacher_ids'\] of several parts, expected one extra that they",
        ),
        (
            PARTS,
            {"teacher_log_probs": log_q[..., :2]},
            r"batch.extras\['teacher_log_probs'\]: got shape \(4, 32, 2\)",
        ),
        (
            PARTS,
            {"teacher_ids": ids[..., 0]},
            r"batch.extras\['teacher_ids'\]: got shape \(4, 32\), expected \[R, T, K",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call(parts, **extras)
    with pytest.raises(
        TypeError, match=r"batch.extras\['teacher_ids'\]: got dtype float32, expected integers"
    ):
        call(teacher_ids=log_q)

"""Several losses of one batch in one pass: the sum of what each gives alone, on every path."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import quick_jit, step_of, with_garbage

from jaxppo import (
    GSPO,
    KL,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    accumulate_gradients,
    explain_broken_rules,
    finalize_metrics,
    policy_loss_from_hidden,
    sft_loss_from_hidden,
)
from jaxppo.losses.joint import SFT, Part, ReferenceKL, joint_loss_from_hidden, joint_normalizers
from jaxppo.policy_losses import KLCov, Reinforce
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.testing import assert_trees_close

H, V = 8, 50
POLICY = PolicyLossConfig(
    entropy_coef=0.01,
    aggregation="sequence_mean_token_mean",
    off_policy=OffPolicyConfig(weights="token", high=1.05, batch_normalize=True),
)
PARTS = {
    "policy": Part(POLICY),
    "written": Part(SFT(label_smoothing=0.1, z_loss=1e-3), coef=0.3),
    "near": Part(ReferenceKL("k2", aggregation="rollout_mean"), coef=0.2),
}
PATHS = {
    "one pass": {"memory": 2**30},
    "two passes": {"memory": 22_000},
    "micro-batches": {"memory": 2**30, "micro_batches": 2},
    "mesh": {"memory": 2**30, "mesh": "dp=2,cp=2,tp=2"},
}


def step(mesh=None, micro_batches=None):
    """The batch, hidden states and kernel; policy on even samples, written ones odd, the divergence on all, weighed."""
    parallel = mesh and make_parallel_mesh(mesh)
    rows = 4 if micro_batches is None else 2
    batch = RolloutBatch.from_samples(
        step_of(0, 12), row_length=32, rows=rows, micro_batches=micro_batches, num_segments=8, parallel=parallel
    )
    segments = np.asarray(batch.segment_ids)
    owners = np.take_along_axis(np.asarray(batch.sample_ids), np.maximum(segments - 1, 0), -1)
    masks = {"policy": batch.loss_mask * (owners % 2 == 0), "written": batch.loss_mask * (owners % 2 == 1)}
    weights = {"near": np.where(batch.loss_mask > 0, 0.5 + owners % 3, np.nan).astype(np.float32)}
    batch = with_garbage(batch, np.nan)
    # what one part does not read may be garbage where only others have loss
    advantages = np.where(masks["policy"] > 0, batch.advantages, np.nan)
    keys = jax.random.split(jax.random.key(0))
    by_token = np.asarray(jax.random.normal(keys[0], (12, 32, H)))  # the same for a token wherever it lies
    hidden = np.where(segments[..., None] > 0, by_token[owners, np.asarray(batch.positions)], np.nan)
    params = {"hidden": hidden.astype(np.float32), "kernel": 0.3 * jax.random.normal(keys[1], (H, V))}
    return dataclasses.replace(batch, advantages=advantages), masks, weights, params, parallel


def alone(name, hidden, kernel, batch, masks, weights, **options):
    """The loss of a part by its own function; ReferenceKL is a policy loss without advantages."""
    batch = dataclasses.replace(batch, loss_mask=masks.get(name, batch.loss_mask), loss_weights=weights.get(name))
    if name == "policy":
        return policy_loss_from_hidden(hidden, kernel, batch, POLICY, **options)
    if name == "written":
        return sft_loss_from_hidden(hidden, kernel, batch, label_smoothing=0.1, z_loss=1e-3, **options)
    config = PolicyLossConfig(Reinforce(), kl=KL(1.0, "k2"), ratio_to="current", aggregation="rollout_mean")
    nothing = dataclasses.replace(batch, advantages=np.zeros_like(batch.loss_mask))
    return policy_loss_from_hidden(hidden, kernel, nothing, config, **options)


def expected_of():
    batch, masks, weights, params, _ = step()

    def run(params):
        found = {n: alone(n, params["hidden"], params["kernel"], batch, masks, weights, memory=22_000) for n in PARTS}
        total = sum(PARTS[n].coef * loss for n, (loss, _) in found.items())
        return total, {n: finalize_metrics(metrics) for n, (_, metrics) in found.items()}

    (total, found), gradient = quick_jit(jax.value_and_grad(run, has_aux=True))(params)
    return total, found, gradient, batch


def by_token(x, batch):
    """`[samples, positions, H]`, wherever the tokens lie."""
    out = np.zeros((12, 32, H), np.float32)
    x, segments, positions = (
        np.asarray(a).reshape(-1, *a.shape[batch.tokens.ndim - 1 :]) for a in (x, batch.segment_ids, batch.positions)
    )
    samples = np.asarray(batch.sample_ids).reshape(-1, batch.num_segments)
    rows, columns = np.nonzero(segments)
    out[samples[rows, segments[rows, columns] - 1], positions[rows, columns]] = x[rows, columns]
    return out


@pytest.mark.parametrize("path", PATHS)
def test_the_sum_of_the_parts(path):
    options = dict(PATHS[path])
    batch, masks, weights, params, parallel = step(options.pop("mesh", None), options.pop("micro_batches", None))

    def loss_of(params, batch, masks, weights, normalizers=None):
        more = {"masks": masks, "weights": weights, "normalizers": normalizers, "parallel": parallel, **options}
        return joint_loss_from_hidden(params["hidden"], params["kernel"], batch, PARTS, **more)

    def run(params, batch, masks, weights):
        if batch.micro_batches is None:
            return jax.value_and_grad(loss_of, has_aux=True)(params, batch, masks, weights)
        normalizers = joint_normalizers(batch, PARTS, masks=masks, weights=weights, parallel=parallel)

        def part(params, given):
            here, *rest = given
            own = jnp.where(here[:, None, None, None] > 0, params["hidden"], 0).sum(axis=0)
            return loss_of(params | {"hidden": own}, *rest)

        given = jnp.eye(batch.micro_batches), batch, masks, weights, normalizers
        return accumulate_gradients(part, given)(params)

    (loss, found), gradient = quick_jit(run)(params, batch, masks, weights)
    total, metrics, expected, of_one = expected_of()
    np.testing.assert_allclose(loss, total, rtol=2e-5)
    numbers = finalize_metrics(found)
    assert_trees_close(numbers.pop("loss"), loss)
    for name, its in metrics.items():
        compared = {"near": {"loss", "kl"}, "written": {"loss", "nll", "log_z"}}
        for what in compared.get(name, {"loss", "pg_loss", "entropy", "tis", "ratio_max"}):
            found = numbers[f"{name}/{what}"]
            np.testing.assert_allclose(found, its[what], rtol=3e-5, atol=1e-6, err_msg=f"{name}/{what}")
    scale = {k: float(jnp.nanmax(jnp.abs(x))) for k, x in expected.items()}
    np.testing.assert_allclose(gradient["kernel"], expected["kernel"], rtol=3e-5, atol=3e-6 * scale["kernel"])
    mine, theirs = by_token(gradient["hidden"], batch), by_token(expected["hidden"], of_one)
    np.testing.assert_allclose(mine, theirs, rtol=3e-5, atol=3e-6 * scale["hidden"])
    assert {name.split("/")[0] for name in numbers} == {*PARTS}


def test_three_products_in_place_of_nine():
    batch, masks, weights, params, _ = step()

    def joint(p):
        return joint_loss_from_hidden(*p, batch, PARTS, masks=masks, weights=weights)[0]

    def one(p):
        return policy_loss_from_hidden(*p, batch, POLICY)[0]

    given = params["hidden"], params["kernel"]
    found = [audit(jax.grad(fn), given) for fn in (one, joint)]
    assert found[0].flops == found[1].flops
    assert "one pass" in found[1].notes[0]

    def small(p):
        return joint_loss_from_hidden(*p, batch, PARTS, memory=22_000)[0]

    assert "two passes" in audit(jax.grad(small), given).notes[0]


def test_a_loss_of_sequences_takes_all_parts_to_two_passes():
    batch, masks, _, params, _ = step()
    of_sequences = PolicyLossConfig(GSPO(0.01, 0.02))
    parts = {"policy": Part(of_sequences), "written": Part(SFT(), coef=jnp.float32(0.3))}

    def run(p):
        return joint_loss_from_hidden(p["hidden"], p["kernel"], batch, parts, masks=masks)[0]

    loss, gradient = quick_jit(jax.value_and_grad(run))(params)

    def separate(p):
        halves = [dataclasses.replace(batch, loss_mask=masks[name]) for name in parts]
        first = policy_loss_from_hidden(p["hidden"], p["kernel"], halves[0], of_sequences)[0]
        return first + 0.3 * sft_loss_from_hidden(p["hidden"], p["kernel"], halves[1])[0]

    expected, slope = quick_jit(jax.value_and_grad(separate))(params)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    assert_trees_close(gradient["kernel"], slope["kernel"], rtol=3e-5, atol=1e-6)


def test_a_rule_that_one_part_breaks():
    batch, masks, _, params, _ = step()
    masks = masks | {"policy": batch.loss_mask}  # advantages are NaN on the written samples

    def run(p):
        return joint_loss_from_hidden(p["hidden"], p["kernel"], batch, PARTS, masks=masks)

    (loss, found), gradient = quick_jit(jax.value_and_grad(run, has_aux=True))(params)
    assert np.isnan(loss)
    assert np.isnan(gradient["kernel"]).any()
    bits = {name: int(found[f"{name}/broken_rules"].value) for name in PARTS}
    assert bits["written"] == bits["near"] == 0
    assert explain_broken_rules(bits["policy"])[0].startswith("values_not_finite")


def test_bad_input():
    batch, masks, weights, params, _ = step()

    def call(parts=PARTS, **more):
        return joint_loss_from_hidden(params["hidden"], params["kernel"], batch, parts, **more)

    with pytest.raises(ValueError, match="parts: got none, expected at least one"):
        call({})
    with pytest.raises(TypeError, match=r"parts\['a'\]: got SFT, expected Part"):
        call({"a": SFT()})
    with pytest.raises(TypeError, match="loss: got float, expected a PolicyLossConfig, SFT or ReferenceKL"):
        Part(0.5)
    with pytest.raises(ValueError, match=r"loss: got KLCov.*, expected one that selects no tokens"):
        Part(PolicyLossConfig(KLCov()))
    with pytest.raises(ValueError, match="coef: got nan, expected a finite number"):
        Part(SFT(), coef=float("nan"))
    with pytest.raises(ValueError, match=r"masks: got 'other', expected some of \['near', 'policy', 'written'\]"):
        call(masks={"other": masks["policy"]})
    with pytest.raises(ValueError, match=r"weights\['near'\]: got shape \(1, 2\), expected the batch's, \(4, 32\)"):
        call(weights={"near": jnp.ones((1, 2))})
    with pytest.raises(ValueError, match=r"batch.ref_log_probs: got None, expected f32\[R, T\] for the part 'a'"):
        joint_loss_from_hidden(
            params["hidden"],
            params["kernel"],
            dataclasses.replace(batch, ref_log_probs=None),
            {"a": Part(ReferenceKL())},
        )
    of_another = Normalizer.from_batches(batch, "token_mean")
    with pytest.raises(ValueError, match="normalizer: got one of aggregation 'token_mean', expected 'rollout_mean'"):
        call({"near": PARTS["near"]}, weights=weights, normalizers={"near": of_another})

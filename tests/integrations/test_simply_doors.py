"""The loss for simply, with a model that has the attributes of its own, beside the formula.
simply is not needed.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simply_batches import V, fields

from jaxppo import KL, PPO, ParallelMesh, PolicyLossConfig, make_parallel_mesh
from jaxppo.integrations import simply

H = 8
NOTHING = {"max_abs_advantage": None, "normalize_advantage": False}


class Annotated:
    """An array in simply's wrapper."""

    def __init__(self, array):
        self.array = array


class Model:
    """What the loss reads of a TransformerLM of simply 0.3.9: its config, and what `apply`
    returns.
    """

    config = SimpleNamespace(activation_dtype_name="float32", output_logits_soft_cap=3.0)

    def apply(self, params, tokens, *, segment_ids, segment_positions, extra_inputs):
        assert segment_ids is None
        assert segment_positions is None
        hidden = params["hidden"][tokens]
        head = params["embed_linear"]
        logits = hidden @ head["w"].array.T + head["b"].array[None, None]
        return 3 * jnp.tanh(logits / 3), {"activation": hidden, "inputs": extra_inputs}


def parameters(hidden):
    keys = jax.random.split(jax.random.key(0))
    w = 0.4 * jax.random.normal(keys[0], (V, H))
    b = 0.3 * jax.random.normal(keys[1], (V,))
    return {"hidden": hidden, "embed_linear": {"w": Annotated(w), "b": Annotated(b)}}


HIDDEN = jax.random.normal(jax.random.key(2), (V, H))
BATCH = SimpleNamespace(**fields())


def by_hand(hidden, batch=BATCH):
    """PPO with clips of 0.2 and 0.28 and k3, token mean, from logits in float64 numpy."""
    logits = np.asarray(Model().apply(
        parameters(hidden), batch.input_tokens, segment_ids=None, segment_positions=None, extra_inputs=None
    )[0], np.float64)  # fmt: skip
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_p = np.take_along_axis(log_p, batch.target_tokens[..., None], -1)[..., 0]
    mask = batch.answer_mask & batch.is_valid_for_training[:, None]
    ratio = np.exp(log_p - batch.logprobs)
    advantage = batch.reward[:, None]
    loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.28))
    back = batch.ref_logprobs - log_p
    return (loss + 0.1 * (np.exp(back) - 1 - back))[mask].mean(), mask.sum()


def test_the_loss_of_a_config():
    config = PolicyLossConfig(PPO(clip_high=0.28), kl=KL(0.1, "k3"), ratio_to="rollout")
    expected, count = by_hand(HIDDEN)
    loss, metrics = simply.loss_fn(config)(Model(), parameters(HIDDEN), BATCH, **NOTHING)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert float(metrics["loss_weight"]) == count
    theirs = {
        "use_grpo": True,
        "kl_coeff": 0.1,
        "ppo_clip_eps_high": 0.28,
        "policy_ratio_cap": None,
    }
    same, _ = simply.loss_fn()(Model(), parameters(HIDDEN), BATCH, **NOTHING, **theirs)
    np.testing.assert_allclose(same, expected, rtol=1e-5)


def test_micro_batches_weigh_by_what_the_loss_divides_by():
    config = PolicyLossConfig(aggregation="sequence_mean_token_mean", ratio_to="rollout")
    _, metrics = simply.loss_fn(config)(Model(), parameters(HIDDEN), BATCH)
    assert metrics["loss_weight"] == 4


def test_under_jit_there_are_no_logits():
    def value(hidden):
        return simply.loss_fn(PolicyLossConfig(ratio_to="rollout"))(
            Model(), parameters(hidden), BATCH
        )[0]

    text = jax.jit(jax.grad(value)).lower(HIDDEN).compile().as_text()
    assert f"f32[6,9,{H}]" in text
    assert f"[6,9,{V}]" not in text


def test_advantages():
    """Whitened over the trained tokens of the batch; discounted from the last position of the
    sample.
    """
    mask = BATCH.answer_mask & BATCH.is_valid_for_training[:, None]
    found = np.asarray(simply.advantages_of(BATCH, gamma=0.9, **NOTHING))
    np.testing.assert_allclose(found[0, 3], BATCH.reward[0] * 0.9**5, rtol=1e-6)
    np.testing.assert_allclose(found[1, 6], BATCH.reward[1], rtol=1e-6)
    assert not found[~mask].any()
    found = np.asarray(simply.advantages_of(BATCH, max_abs_advantage=1.2))
    free = np.asarray(simply.advantages_of(BATCH, max_abs_advantage=None))
    np.testing.assert_allclose([free[mask].mean(), free[mask].std()], [0, 1], atol=1e-4)
    np.testing.assert_allclose(found, np.clip(free, -1.2, 1.2), rtol=1e-6)
    assert np.abs(free).max() > 1.2


@pytest.mark.parametrize(
    ("given", "theirs", "message"),
    [
        (
            None,
            {"something_new": 1},
            "something_new: got it in the loss, which does not read it, expected kl_coeff",
        ),
        (
            PolicyLossConfig(),
            {"kl_coeff": 0.1},
            "kl_coeff: got 0.1 beside a config, expected it in the config alone",
        ),
        (
            None,
            {},
            "use_grpo: got False with kl_coeff=0.001, a penalty in the rewards, expected True or",
        ),
        (PolicyLossConfig(), {}, "batch.old_log_probs: got None"),
    ],
    ids=["unknown", "twice", "penalty in rewards", "no old log-probs"],
)
def test_what_the_loss_refuses(given, theirs, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        simply.loss_fn(given)(Model(), parameters(HIDDEN), BATCH, **theirs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"config": "grpo"}, "config: got str, expected PolicyLossConfig or None"),
        ({"parallel": "data=2"}, "parallel: got str, expected ParallelMesh or None"),
        (
            {"parallel": make_parallel_mesh("cp=8", context_layout="zigzag")},
            "parallel: got context_layout='zigzag'",
        ),
    ],
    ids=["config", "mesh", "layout"],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        simply.loss_fn(**wrong)


def test_other_models():
    config = PolicyLossConfig(ratio_to="rollout")
    bare = SimpleNamespace(apply=lambda *_, **__: (None, {}), config=Model.config)
    with pytest.raises(
        TypeError, match=r"^model: got SimpleNamespace, which returns no 'activation'"
    ):
        simply.loss_fn(config)(bare, {}, BATCH)
    with pytest.raises(
        TypeError, match=r"^params: got layers, expected the parameters of a TransformerLM"
    ):
        simply.head_of(Model(), {"layers": {}})
    quantised = {"embed_linear": {"w": {"quant_array": 1, "scale": 1}}}
    with pytest.raises(TypeError, match=r"^params: got embed_linear.w of dict, expected an array"):
        simply.head_of(Model(), quantised)


def test_the_axes_of_its_meshes():
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"))
    parallel = ParallelMesh(mesh, data="replica", fsdp="data")
    assert parallel.kernel_spec("vh") == jax.P("model", "data")

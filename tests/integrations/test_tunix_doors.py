"""What Tunix hands over and jaxppo does not read is refused by name, never dropped.

Tunix itself is not needed.
"""

import enum
import inspect
import pickle
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxtext_model import Transformer
from plain_head import reference_from_logits
from tunix_modules import Embedder

from jaxppo import PPO, PolicyLossConfig, log_probs_from_hidden, make_parallel_mesh
from jaxppo.integrations import tunix

# of Tunix's branches after August 2026
UNREAD = {
    "logps_mask": np.ones((1, 6), bool),
    "max_logp_positions": 4,
    "something new": 0,
}
PROMPTS = np.array([[3, 4]])
COMPLETIONS = np.array([[5, 6, 7, 0]])


class Model(nnx.Module):
    """The attributes of a Tunix model that its call's `skip_lm_head` makes of states after the
    last norm.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embedder = Embedder(16, 8, rngs=rngs)
        self.final_norm = nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, tokens, positions, cache, attention_mask, skip_lm_head=False):
        x = self.final_norm(self.embedder.input_embedding[...][tokens])
        return (x if skip_lm_head else self.embedder.decode(x)), cache


class Unknown(Model):
    """Its last norm is a part of what makes the logits, so skip_lm_head leaves it out."""

    def __init__(self):
        super().__init__()
        self.last, self.final_norm = self.final_norm, None
        del self.final_norm

    def __call__(self, tokens, positions, cache, attention_mask, skip_lm_head=False):
        x = self.embedder.input_embedding[...][tokens]
        return (x if skip_lm_head else self.embedder.decode(self.last(x))), cache


class MaxText(Transformer):
    """Tokens attend to those before them in their segment, in one sum."""

    def states(self, tokens, segments):
        same = jnp.tril(segments[:, :, None] == segments[:, None, :])
        return jnp.einsum("btu,buh->bth", same.astype(jnp.float32), self.token_embedder(tokens))

    def __call__(self, decoder_input_tokens, decoder_positions, decoder_segment_ids):
        return self.logits(self.states(decoder_input_tokens, decoder_segment_ids))


class August(nnx.Module):
    """MaxText's adapter of August 2026."""

    def __init__(self, base):
        self.base = base

    def __call__(
        self,
        input_tokens,
        positions,
        cache,
        attention_mask,
        decoder_segment_ids=None,
        output_hidden_states=False,
    ):
        return self.base(input_tokens, positions, decoder_segment_ids), None


class September(August):
    """That of a branch of September."""

    def __call__(
        self,
        input_tokens,
        positions,
        cache,
        attention_mask,
        decoder_segment_ids=None,
        skip_lm_head=False,
    ):
        states = self.base.states(input_tokens, decoder_segment_ids)
        return (states if skip_lm_head else self.base.logits(states)), None


class Role(enum.Enum):
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    ACTOR = "actor"


class Cluster:
    """What jaxppo's class reads of Tunix's."""

    inference_worker = SimpleNamespace(get_model=lambda role: Model())
    rollout = SimpleNamespace(pad_id=lambda: 0, model=Model)
    r2m = dict.fromkeys(Role, SimpleNamespace(empty=True))
    cluster_config = SimpleNamespace(offload_to_cpu=False)
    actor_trainer = SimpleNamespace(model=Model())
    _anchor_policy_state = nnx.state(Model())

    def get_rollout_config(self, mode):
        return SimpleNamespace(temperature=0.9)


THEIRS = SimpleNamespace(Role=Role, Mode=SimpleNamespace(TRAIN="train"), RLCluster=Cluster)


def passes():
    """By name, Tunix's call of each pass for log-probs."""
    cluster = tunix._without_logits(THEIRS, None, {})()
    return {
        "old": lambda **more: cluster.rollout.get_per_token_logps(PROMPTS, COMPLETIONS, **more),
        "reference": lambda **more: cluster.inference_worker.get_ref_per_token_logps(
            PROMPTS, COMPLETIONS, 0, 1, **more
        ),
        "actor": lambda **more: cluster.get_actor_per_token_logps(
            PROMPTS, COMPLETIONS, 0, 1, **more
        ),
    }


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("of", ["old", "reference", "actor"])
def test_a_pass_refuses_what_it_does_not_read(of, name):
    with pytest.raises(
        TypeError,
        match=f"^{name}: got it in a pass for log-probs, which does not read it, expected",
    ):
        passes()[of](**{name: UNREAD[name]})


def example(**more):
    fields = {
        "prompt_ids": PROMPTS,
        "completion_ids": COMPLETIONS,
        "completion_mask": COMPLETIONS != 0,
    }
    fields |= {
        "advantages": np.ones(1, np.float32),
        "old_per_token_logps": None,
        "ref_per_token_logps": None,
    }
    return SimpleNamespace(**(fields | more))


@pytest.mark.parametrize("name", UNREAD)
def test_an_example_with_a_field_that_no_loss_reads(name):
    made = tunix.batch_of(example(**dict.fromkeys(UNREAD)), 0)
    assert made.loss_mask.sum() == 3
    with pytest.raises(
        TypeError, match=f"^{name}: got it in a TrainExample, which does not read it"
    ):
        tunix.batch_of(example(**{name: UNREAD[name]}), 0)


class Slots:
    """A payload that keeps its fields elsewhere than in its `__dict__`, as dataclasses with
    slots do.
    """

    __slots__ = tuple(vars(example(logps_mask=0)))

    def __init__(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)


def test_fields_in_slots_are_read_too():
    with pytest.raises(TypeError, match=r"^logps_mask: got it in a TrainExample"):
        tunix.batch_of(Slots(**vars(example(logps_mask=UNREAD["logps_mask"]))), 0)


class Routed(Model):
    """An expert for each token, the sampler's where it is given, adds to what the last norm
    reads.
    """

    def __init__(self):
        super().__init__()
        self.experts = nnx.Param(jax.random.normal(jax.random.key(1), (4, 8)))

    def __call__(
        self,
        tokens,
        positions,
        cache,
        attention_mask,
        skip_lm_head=False,
        forced_routed_experts=None,
        **_,
    ):
        own = tokens % 4
        chosen = own if forced_routed_experts is None else forced_routed_experts[:, :, 0, 0]
        chosen = jnp.where(chosen < 0, own, chosen)
        x = self.final_norm(self.embedder.input_embedding[...][tokens] + self.experts[...][chosen])
        return (x if skip_lm_head else self.embedder.decode(x)), cache


# as Tunix aligns them, prompt and completion
EXPERTS = np.array([[-1, 3, 1, 2, -1, -1]], np.int16)[..., None, None]


def test_the_samplers_experts_are_replayed():
    """Values and gradients; -1 leaves the choice to the model."""
    graph, params = nnx.split(Routed())
    tokens = jnp.concatenate([PROMPTS, COMPLETIONS], axis=1)

    def ours(params, experts):
        model = nnx.merge(graph, params)
        hidden = tunix.hidden_states(model, tokens, None, None, routed_experts=experts)
        return log_probs_from_hidden(hidden, tunix.head_of(model), tokens).log_probs.sum()

    def theirs(params, experts):
        logits, _ = nnx.merge(graph, params)(
            tokens, None, None, None, forced_routed_experts=experts
        )
        return reference_from_logits(logits, tokens).log_probs.sum()

    experts = jnp.asarray(EXPERTS, jnp.int32)
    found = jax.jit(jax.value_and_grad(ours))(params, experts)
    expected = jax.jit(jax.value_and_grad(theirs))(params, experts)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(same, found[1], expected[1])
    assert abs(found[0] - jax.jit(ours)(params, None)) > 1e-2
    with pytest.raises(
        TypeError,
        match=r"^routed_experts: got them for Model, whose call takes no forced_routed_exp",
    ):
        tunix.hidden_states(Model(), tokens, None, None, routed_experts=EXPERTS)


def test_the_samplers_experts_are_an_extra_of_the_batch():
    batch = tunix.batch_of(example(routed_experts=EXPERTS), 0)
    np.testing.assert_array_equal(batch.extras["routed_experts"], EXPERTS)
    ids = np.array([[1, 1, 1, 2, 2, 0]])
    places = np.array([[0, 1, 2, 0, 1, 0]])
    packed = {"prompt_ids": np.zeros((1, 0), int), "completion_ids": np.array([[3, 4, 5, 6, 7, 0]])}
    packed |= {
        "completion_mask": np.array([[0, 1, 1, 0, 1, 0]]),
        "segment_ids": ids,
        "segment_positions": places,
    }
    batch = tunix.batch_of(
        example(routed_experts=EXPERTS, **packed, advantages=np.ones((1, 6), np.float32)), 0
    )
    np.testing.assert_array_equal(batch.extras["routed_experts"], EXPERTS)


def test_a_payload_with_the_samplers_log_probs():
    """Branches of September hand over the sampler's beside the old ones, and a verdict that an
    option reads.
    """
    sampled = np.array([[-1.0, -2.0, -3.0, 0.0]], np.float32)
    made = tunix.batch_of(
        example(rollout_per_token_logps=sampled, overlong=np.zeros(1), metadata={}), 0
    )
    # at the position before the token
    np.testing.assert_array_equal(made.rollout_log_probs[made.loss_mask > 0], [-1, -2, -3])
    assert made.old_log_probs is None
    with pytest.raises(
        TypeError,
        match=r"^train_example: got SimpleNamespace without completion_ids, expected Tunix's",
    ):
        tunix.batch_of(SimpleNamespace(token_ids=COMPLETIONS), 0)


def test_a_loss_for_with_loss_fn():
    loss = tunix.loss_fn(
        PolicyLossConfig(PPO(clip_high=0.28)), make_parallel_mesh, num_segments=3, memory=2**20
    )
    called = inspect.signature(loss)
    assert [*called.parameters] == [
        "model",
        "train_example",
        "algo_config",
        "pad_id",
        "eos_id",
        "more",
    ]
    sent = pickle.loads(pickle.dumps(loss))
    assert vars(sent) == vars(loss)


@pytest.mark.parametrize("name", UNREAD)
def test_the_loss_refuses_arguments_that_it_does_not_read(name):
    with pytest.raises(TypeError, match=f"^{name}: got it in the loss, which does not read it"):
        tunix.loss_fn()(Model(), example(), None, 0, 1, **{name: UNREAD[name]})


@pytest.mark.parametrize("config", [None, PolicyLossConfig()], ids=["theirs", "ours"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("overlong_loss_masking", True),
        ("truncated_importance_sampling_type", "seq-mask-tis"),
        ("sampler_is_length_buckets", (256,)),
    ],
)
def test_options_that_the_loss_does_not_apply(option, value, config):
    options = {"epsilon": 0.2, "beta": 0.0, "loss_algo": "grpo", "loss_agg_mode": "token-mean"}
    with pytest.raises(
        ValueError, match=f"^{option}: got .* in SimpleNamespace, expected None or False"
    ):
        tunix.loss_fn(config)(
            Model(), example(), SimpleNamespace(**options, **{option: value}), 0, 1
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"config": "grpo"}, "config: got str, expected PolicyLossConfig or None"),
        (
            {"parallel": "fsdp=2"},
            "parallel: got str, expected ParallelMesh, a function that makes one, None",
        ),
        ({"memory": "much"}, "memory: "),
        ({"lora_scale": float("nan")}, "lora_scale: got nan, expected a finite number"),
        ({"num_segments": 1.5}, "num_segments: got 1.5, expected a whole number of at least 1"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_wrong_arguments_of_a_loss(wrong, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        tunix.loss_fn(**wrong)


def test_wrong_arguments_of_a_cluster_and_of_a_name():
    """They are refused where they are given, whether Tunix is installed or not."""
    with pytest.raises(ValueError, match=r"^lora_scale: got nan, expected a finite number"):
        tunix.rl_cluster(lora_scale=float("nan"))
    with pytest.raises(ValueError, match=r"^name: got 3, expected a text"):
        tunix.register(name=3)


def test_a_function_that_makes_no_mesh():
    with pytest.raises(
        TypeError, match=r"^parallel: got dict from the function, expected ParallelMesh or None"
    ):
        tunix.loss_fn(PolicyLossConfig(), dict)(Model(), example(), None, 0, 1)


def test_states_before_the_last_norm_are_not_taken_for_final_ones():
    tokens = jnp.array([[3, 4, 5]])
    places = jnp.arange(3)[None]
    model = Model()
    hidden = tunix.hidden_states(model, tokens, places, None)
    np.testing.assert_allclose(
        model.embedder.decode(hidden), model(tokens, places, None, None)[0], rtol=1e-6
    )
    with pytest.raises(
        TypeError, match=r"model: got Unknown without a final_norm, expected one of tunix\.models"
    ):
        tunix.hidden_states(Unknown(), tokens, places, None)
    assert jax.tree.leaves(nnx.state(model))


@pytest.mark.parametrize("adapter", [August, September])
@pytest.mark.parametrize("tied", [False, True], ids=["logits_dense", "tied"])
def test_maxtexts_adapter(adapter, tied):
    """Values and gradients are those of the logits, whose product is not in the compiled
    program.
    """
    graph, params = nnx.split(adapter(MaxText(logits_via_embedding=tied)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 6)))
    segments = jnp.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0]])
    positions = jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]])
    targets = jnp.roll(tokens, -1, axis=1)

    def ours(params):
        model = nnx.merge(graph, params)
        hidden = tunix.hidden_states(model, tokens, positions, None, segments)
        return log_probs_from_hidden(hidden, tunix.head_of(model), targets).log_probs.sum()

    def theirs(params):
        logits, _ = nnx.merge(graph, params)(tokens, positions, None, None, segments)
        return reference_from_logits(logits, targets).log_probs.sum()

    found, expected = (jax.jit(jax.value_and_grad(f))(params) for f in (ours, theirs))
    # their gradient of an embedding is rounded to bf16
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if tied else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), found[1], expected[1])
    made = jax.jit(ours).lower(params).compile().as_text()
    assert made.count(" dot(") == 2  # the attention and the head's own


def test_maxtexts_hidden_states_are_in_the_dtype_of_its_head():
    model = August(MaxText())
    model.base.decoder.logits_dense.dtype = jnp.bfloat16
    ids = jnp.ones((1, 4), jnp.int32)
    assert tunix.hidden_states(model, ids, ids, None, ids).dtype == jnp.bfloat16
    assert isinstance(model.base.decoder.decoder_norm, nnx.RMSNorm)  # only the copy records


def test_a_maxtext_model_that_does_not_call_its_last_norm():
    """As with `num_vocab_tiling` above 1."""
    model = August(MaxText())
    model.base.logits = lambda states: None
    ids = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(
        TypeError, match="model: got August, whose call never uses its decoder_norm"
    ):
        tunix.hidden_states(model, ids, ids, None, ids)


@pytest.mark.parametrize(
    ("tied", "name"), [(False, "decoder.logits_dense"), (True, "token_embedder")]
)
def test_an_adapter_of_maxtexts_head_is_refused(tied, name):
    model = August(MaxText(logits_via_embedding=tied))
    with pytest.raises(
        TypeError, match=r"^lora_scale: got 2\.0, expected None for a MaxText model"
    ):
        tunix.head_of(model, lora_scale=2.0)
    of_head = model.base.token_embedder if tied else model.base.decoder.logits_dense
    of_head.kernel_lora_a = nnx.LoRAParam(jnp.ones((8, 2)))
    with pytest.raises(
        TypeError, match=rf"^model\.{name}: got kernel_lora_a, expected a head without an adapter"
    ):
        tunix.head_of(model)

"""What Tunix hands over and jaxppo does not read is refused by name, never dropped. Tunix itself is not needed."""

import enum
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix_modules import Embedder

from jaxppo.integrations import tunix

# of Tunix's branches after August 2026
UNREAD = {
    "routed_experts": np.zeros((1, 6, 2, 2), np.int32),
    "token_mask": np.ones((1, 6), bool),
    "logps_mask": np.ones((1, 6), bool),
    "max_logp_positions": 4,
    "something new": 0,
}
PROMPTS, COMPLETIONS = np.array([[3, 4]]), np.array([[5, 6, 7, 0]])


class Model(nnx.Module):
    """The attributes of a Tunix model that its call's `skip_lm_head` makes of states after the last norm."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embedder = Embedder(16, 8, rngs=rngs)
        self.final_norm = nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, tokens, positions, cache, attention_mask, skip_lm_head=False):
        x = self.final_norm(self.embedder.input_embedding[...][tokens])
        return (x if skip_lm_head else self.embedder.decode(x)), cache


class Adapter(Model):
    """As MaxText's: the last norm is a part of what makes the logits, so skip_lm_head leaves it out."""

    def __init__(self):
        super().__init__()
        self.base, self.final_norm = self.final_norm, None
        del self.final_norm

    def __call__(self, tokens, positions, cache, attention_mask, skip_lm_head=False):
        x = self.embedder.input_embedding[...][tokens]
        return (x if skip_lm_head else self.embedder.decode(self.base(x))), cache


class Role(enum.Enum):
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    ACTOR = "actor"


THEIRS = SimpleNamespace(Role=Role, Mode=SimpleNamespace(TRAIN="train"))
CLUSTER = SimpleNamespace(
    parallel_of=lambda role: None,
    get_rollout_config=lambda mode: SimpleNamespace(temperature=0.9),
    actor_trainer=SimpleNamespace(model=Model()),
    _anchor_policy_state=nnx.state(Model()),
)


def passes():
    """By name, Tunix's call of each pass for log-probs."""
    ours = tunix._Passes(THEIRS, None, {})
    rollout = ours.rollout(CLUSTER, SimpleNamespace(pad_id=lambda: 0, model=Model))
    worker = ours.inference_worker(CLUSTER, SimpleNamespace(get_model=lambda role: Model()))
    return {
        "old": lambda **more: rollout.get_per_token_logps(PROMPTS, COMPLETIONS, **more),
        "reference": lambda **more: worker.get_ref_per_token_logps(PROMPTS, COMPLETIONS, 0, 1, **more),
        "actor": lambda **more: ours.actor(CLUSTER, 1, None, 0, (PROMPTS, COMPLETIONS), more),
    }


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("of", ["old", "reference", "actor"])
def test_a_pass_refuses_what_it_does_not_read(of, name):
    with pytest.raises(TypeError, match=f"^{name}: got it in a pass for log-probs, which does not read it, expected"):
        passes()[of](**{name: UNREAD[name]})


@pytest.mark.parametrize("name", UNREAD)
def test_an_example_with_a_field_that_no_loss_reads(name):
    fields = {"prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "completion_mask": COMPLETIONS != 0}
    fields |= {"advantages": np.ones(1, np.float32), "old_per_token_logps": None, "ref_per_token_logps": None}
    made = tunix.batch_of(SimpleNamespace(**fields, **dict.fromkeys(UNREAD)), 0)
    assert made.loss_mask.sum() == 3
    with pytest.raises(TypeError, match=f"^{name}: got it in a TrainExample, which does not read it"):
        tunix.batch_of(SimpleNamespace(**fields, **{name: UNREAD[name]}), 0)


def test_states_before_the_last_norm_are_not_taken_for_final_ones():
    tokens, places = jnp.array([[3, 4, 5]]), jnp.arange(3)[None]
    model = Model()
    hidden = tunix.hidden_states(model, tokens, places, None)
    np.testing.assert_allclose(model.embedder.decode(hidden), model(tokens, places, None, None)[0], rtol=1e-6)
    with pytest.raises(TypeError, match=r"model: got Adapter without a final_norm, expected one of tunix\.models"):
        tunix.hidden_states(Adapter(), tokens, places, None)
    assert jax.tree.leaves(nnx.state(model))

"""Batches as Tunix hands them over, in the form of 0.1.7 and in that of its main branch, a model
and Tunix's modules.

They restate what a loss of Tunix sees: the names of the fields of its `TrainExample`, with the
defaults of the main branch of September 2026, and the two functions of `tunix.sft.utils` that a
loss needs.
"""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix_modules import Embedder

PAD, V, H = 0, 16, 8
# the id of the padding stands for a token too: in the second prompt, and in both completions
PROMPTS = np.array([[0, 0, 3, 4], [5, 0, 6, 2]], np.int32)
PROMPT_TOKENS = np.array([[0, 0, 1, 1], [1, 1, 1, 1]], bool)
COMPLETIONS = np.array([[5, 0, 7, 8, 0], [9, 3, 0, 0, 0]], np.int32)
COMPLETION_TOKENS = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], bool)
# a tool wrote the third token of the first one
LOSS_MASK = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 0, 0]], np.int32)
TOKEN_MASK = np.concatenate([PROMPT_TOKENS, COMPLETION_TOKENS], axis=1)
ADVANTAGES = np.array([1.0, -0.5], np.float32)

# what the agentic learners of Tunix 0.1.7 read of a loss's metrics, besides those that its learners
# log everywhere
AGENTIC_METRICS = (
    "kl",
    "entropy",
    "pg_loss",
    "pg_clipfrac",
    "ppo_kl",
    "kl_loss",
    "sampler_is/weight_mean",
)
AGENTIC_METRICS += (
    "is_ratio/mean",
    "is_ratio/max",
    "is_ratio/min",
    "log_ratio/abs_mean",
    "sampler_is/weight_min",
)
AGENTIC_METRICS += (
    "pg_loss/unclipped_mean",
    "pg_loss/clipped_mean",
    "advantage/abs_mean",
    "advantage/max",
)
AGENTIC_METRICS += ("advantage/min", "advantage/nonzero_frac")


class Attending(nnx.Module):
    """Each token adds up the tokens that its attention mask leaves it; positions turn some units
    by their sine.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embedder = Embedder(V, H, rngs=rngs)
        self.final_norm = nnx.RMSNorm(H, rngs=rngs)

    def __call__(self, tokens, positions, cache, attention_mask, skip_lm_head=False):
        x = self.embedder.input_embedding[...][tokens] * (
            1 + 0.1 * positions[..., None].astype(jnp.float32)
        )
        x = self.final_norm(jnp.einsum("btu,buh->bth", attention_mask.astype(jnp.float32), x))
        return (x if skip_lm_head else self.embedder.decode(x)), cache


def example(*, new=True, **more):
    """A padded batch. The new form has the flag, and says which ids are tokens."""
    fields: dict[str, Any] = {
        "prompt_ids": PROMPTS,
        "prompt_mask": PROMPT_TOKENS,
        "completion_ids": COMPLETIONS,
    }
    fields |= {"completion_mask": LOSS_MASK, "advantages": ADVANTAGES}
    fields |= dict.fromkeys(("old_per_token_logps", "ref_per_token_logps", "sampler_is_weights"))
    fields |= dict.fromkeys(("segment_ids", "segment_positions"))
    if new:
        fields |= {
            "sampler_agreement_applied": False,
            "completion_attention_mask": COMPLETION_TOKENS,
        }
        fields |= {"num_segments": None, "is_update_step": None, "routed_experts": None}
    return SimpleNamespace(**(fields | more))


def algo_config(**options):
    """A `GRPOConfig` of the main branch: its defaults, but for beta, which asks for a reference."""
    fields = {
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "epsilon_c": None,
        "beta": 0.0,
        "kl_loss_mode": "kl",
    }
    fields |= {
        "kl_clamp_value": None,
        "loss_algo": "grpo",
        "loss_agg_mode": "sequence-mean-token-mean",
    }
    fields |= {"temperature": 1.0, "use_rollout_logps": True, "force_on_policy_ratio": False}
    fields |= {
        "log_sampler_trainer_agreement": False,
        "exact_token_continuity": True,
        "sampler_is": None,
    }
    fields |= {
        "sampler_is_threshold": 2.0,
        "sampler_rs": None,
        "sampler_rs_min": None,
        "sampler_rs_max": None,
    }
    return SimpleNamespace(**(fields | {"seq_logprob_error_threshold": None} | options))


@dataclasses.dataclass
class WeightedMetric:
    unreduced_sum: Any
    denominator: Any


@dataclasses.dataclass
class LossOutput:
    primary_loss: WeightedMetric
    aux_metrics: dict[str, Any]


@dataclasses.dataclass
class PlainConfig:
    """The fields that say something here of the `GRPOConfig` of Tunix 0.1.7's plain learner:
    there are none.
    """

    beta: float = 0.04


@dataclasses.dataclass
class SamplerConfig(PlainConfig):
    use_rollout_logps: bool = True


@dataclasses.dataclass
class TrainExample:
    old_per_token_logps: Any = None


def install(monkeypatch, *, new=True):
    """Stands for the installed Tunix, with what `register` and a loss import of it.

    Returns its registry's entries.
    """
    registered: dict[str, Any] = {}

    def register_policy_loss_fn(name):
        return lambda loss: registered.setdefault(name, loss)

    contents: dict[str, dict[str, Any]] = {
        "tunix.sft.utils": (
            {"WeightedMetric": WeightedMetric, "LossOutput": LossOutput} if new else {}
        ),
        "tunix.rl.common": {"TrainExample": TrainExample},
        "tunix.rl.function_registry": {"register_policy_loss_fn": register_policy_loss_fn},
        "tunix.rl.grpo.grpo_learner": {"GRPOConfig": SamplerConfig if new else PlainConfig},
    }
    for path, names in contents.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in contents or depth < len(parts):
                monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.setattr(sys.modules[path.rpartition(".")[0]], parts[-1], module, raising=False)
    return registered


def value(metric):
    """A metric as a number: the main branch's are sums and counts."""
    if isinstance(metric, WeightedMetric):
        return metric.unreduced_sum / metric.denominator
    return metric


def loss_and_gradient(loss_fn, model, batch, config):
    """(loss, metrics, gradient of the parameters) of a loss with the signature of Tunix's."""
    graph, params = nnx.split(model)

    def of(params):
        found = loss_fn(
            nnx.merge(graph, params), batch, config, PAD, 1, max_logp_positions_per_packed_row=5
        )
        loss, aux = (
            (found.primary_loss, found.aux_metrics) if isinstance(found, LossOutput) else found
        )
        return value(loss), {name: value(metric) for name, metric in aux.items()}

    (loss, metrics), gradient = jax.value_and_grad(of, has_aux=True)(params)
    return loss, metrics, gradient

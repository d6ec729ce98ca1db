"""simply (google-deepmind/simply, version 0.3.9): policy losses from hidden states, see
docs/frameworks.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.base.kl import KL
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.arguments import check_options
from jaxppo.head.call import HeadOptions
from jaxppo.head.head import Head
from jaxppo.losses.doors import policy_loss_from_hidden
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import PPO
from jaxppo.sharding import ParallelMesh, check_parallel, in_order
from jaxppo.step.aggregation import Normalizer


def loss_fn(
    config: PolicyLossConfig | None = None,
    parallel: ParallelMesh | None = None,
    **options: Unpack[HeadOptions],
) -> Callable[..., Any]:
    """A policy loss for `custom_loss_fn=` of simply's `train_one_step`: `policy_loss_from_hidden`
    with its signature.

    It is called as `loss(model, params, batch, **theirs)`, where `theirs` are options of simply's
    `compute_ppo_loss`, with its defaults. Those of `advantages_of` always count. Those of
    `config_of` are refused beside a config.

    Args:
      config: the loss, with `ratio_to="rollout"` or "current", since the batch has the sampler's
        log-probs alone; None takes it from the options of the call.
      parallel: the mesh of the model.
      **options: of the head, see `HeadOptions`.

    Returns:
      A function that returns the loss and metrics. Their `loss_weight` is the number of tokens (of
      sequences, for means of sequences), by which simply weighs micro-batches; so do not split a
      step whose aggregation is "token_sum". `broken_rules_max` is `broken_rules` of one of the
      micro-batches.

    Raises:
      TypeError, ValueError: a wrong config, mesh or option.

    Example:
      >>> loss = loss_fn(PolicyLossConfig(ratio_to="rollout"))
      >>> loss(None, None, None, kl_coeff=0.1)
      Traceback (most recent call last):
      ValueError: kl_coeff: got 0.1 beside a config, expected it in the config alone

    simply, https://github.com/google-deepmind/simply: simply/rl_lib.py
    """
    if config is not None and not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected PolicyLossConfig or None")
    check_parallel(parallel, "ParallelMesh or None")
    if parallel is not None and not in_order(parallel.context_layout, parallel.context_size):
        raise ValueError(
            f"parallel: got context_layout={parallel.context_layout!r}, expected 'contiguous', as"
            " simply's is"
        )
    check_options(options)

    def loss(
        model: Any, params: Any, batch: Any, **theirs: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        shaping = {
            name: theirs.pop(name)
            for name in inspect.signature(advantages_of).parameters
            if name in theirs
        }
        policy = _policy(config, theirs)
        reference = batch.ref_logprobs
        if reference is None and config is None and policy.kl is not None:  # as in theirs
            reference = batch.logprobs
        if reference is not None:
            reference = jnp.asarray(reference, jnp.float32)
        advantages = advantages_of(batch, **shaping)
        rows = batch_of(batch, parallel=parallel, advantages=advantages, ref_log_probs=reference)
        hidden = _hidden(model, params, batch)
        normalizer = Normalizer.of(policy, rows, parallel=parallel)
        head = head_of(model, params)
        value, metrics = policy_loss_from_hidden(
            hidden, head, rows, policy, parallel=parallel, normalizer=normalizer, **options
        )
        logged = {name: metric.value for name, metric in metrics.items()}
        # simply takes means of names without _max and _min
        logged["broken_rules_max"] = logged.pop("broken_rules")
        counts = {"token_mean": normalizer.tokens, "token_sum": jnp.float32(1)}
        logged["loss_weight"] = counts.get(normalizer.aggregation, normalizer.sequences)
        return value, logged

    return loss


def _policy(config: PolicyLossConfig | None, theirs: Mapping[str, Any]) -> PolicyLossConfig:
    """The config, or without one that of simply's options; raises for options that are not read."""
    names = inspect.signature(config_of).parameters
    for name, value in theirs.items():
        if name not in names:
            raise TypeError(
                f"{name}: got it in the loss, which does not read it, expected {', '.join(names)}"
            )
        if config is not None:
            raise ValueError(
                f"{name}: got {value} beside a config, expected it in the config alone"
            )
    if config is None:
        return config_of(**theirs)
    return config


def _hidden(model: Any, params: Any, batch: Any) -> jax.Array:
    """The hidden states that the head multiplies."""
    _, extra = model.apply(
        params,
        batch.input_tokens,
        segment_ids=None,
        segment_positions=None,
        extra_inputs=batch.extra_inputs,
    )
    if "activation" not in extra:
        raise TypeError(
            f"model: got {type(model).__name__}, which returns no 'activation', expected a"
            " TransformerLM"
        )
    return extra["activation"].astype(model.config.activation_dtype_name)


def config_of(
    *,
    kl_coeff: float = 0.001,
    use_grpo: bool = False,
    ppo_clip_eps_high: float = 0.2,
    ppo_clip_eps_low: float = 0.2,
    policy_ratio_cap: float | None = 10.0,
    use_policy_logp_as_sampler_logp: bool = False,
) -> PolicyLossConfig:
    """The policy loss of the options of simply's `compute_ppo_loss`, with its defaults.

    `policy_ratio_cap` is a dual clip. `use_grpo` adds `kl_coeff` times k3 to the loss. Without it
    simply puts the penalty into the rewards, from the policy's log-probs of the same pass: that
    needs `kl_coeff=0` here. `use_policy_logp_as_sampler_logp` makes the ratio 1.

    Raises:
      ValueError: a penalty in the rewards, a value out of its range.

    Example:
      >>> config_of(use_grpo=True, kl_coeff=0.0, ppo_clip_eps_high=0.28).loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=10.0)
    """
    if kl_coeff and not use_grpo:
        raise ValueError(
            f"use_grpo: got False with kl_coeff={kl_coeff}, a penalty in the rewards, expected True"
            " or kl_coeff=0; for rewards with a penalty see jaxppo.advantages.token_rewards"
        )
    loss = PPO(ppo_clip_eps_low, ppo_clip_eps_high, policy_ratio_cap)
    kl = KL(kl_coeff, "k3") if kl_coeff else None
    if use_policy_logp_as_sampler_logp:
        return PolicyLossConfig(loss, kl=kl, ratio_to="current")
    return PolicyLossConfig(loss, kl=kl, ratio_to="rollout")


def advantages_of(
    batch: Any,
    *,
    gamma: float = 1.0,
    normalize_advantage: bool = True,
    max_abs_advantage: float | None = 10.0,
) -> Float[Array, "R T"]:
    """The advantages of simply's `compute_ppo_loss`: discounted rewards, whitened over the batch,
    and bounded.

        A_t = clip((gamma^(n - 1 - t) r - mean) / (deviation + 1e-5), -max_abs_advantage, max_abs_advantage)

    n is the number of positions of the sample, t counts from 0; mean and deviation are over the
    trained tokens.

    Args:
      batch: simply's `RLTrainingExampleBatch`.
      gamma: the discount.
      normalize_advantage: whiten.
      max_abs_advantage: the bound, or None.

    Returns:
      `f32[R, T]`, 0 where nothing is trained.
    """
    mask = _mask(batch)
    advantages = jnp.asarray(batch.reward, jnp.float32)[:, None] * jnp.ones_like(mask)
    if gamma != 1:
        left = (
            jnp.sum(batch.target_mask, axis=-1, keepdims=True) - 1 - jnp.arange(mask.shape[1])[None]
        )
        advantages *= jnp.where(mask > 0, jnp.float32(gamma) ** left.astype(jnp.float32), 0)
    if normalize_advantage:
        count = jnp.maximum(mask.sum(), 1)
        mean = jnp.sum(advantages * mask) / count
        deviation = jnp.sqrt(jnp.sum((advantages - mean) ** 2 * mask) / count)
        advantages = (advantages - mean) / (deviation + 1e-5)
    if max_abs_advantage is not None:
        advantages = jnp.clip(advantages, -max_abs_advantage, max_abs_advantage)
    return jnp.where(mask > 0, advantages, 0)


def _mask(batch: Any) -> Float[Array, "R T"]:
    trains = jnp.asarray(batch.is_valid_for_training, bool)[:, None]
    return (jnp.asarray(batch.answer_mask, bool) & trains).astype(jnp.float32)


def batch_of(batch: Any, *, parallel: ParallelMesh | None = None, **arrays: Any) -> RolloutBatch:
    """Converts simply's `RLTrainingExampleBatch`, one sample a row; works under jit.

    Args:
      batch: input_tokens, target_tokens, logprobs, target_mask and answer_mask `[R, T]`;
        is_valid_for_training `[R]`.
      parallel: the mesh.
      **arrays: the other arrays of the batch (advantages, ref_log_probs, ...), at the position that
        predicts.

    Returns:
      `[R, T]`, with the sampler's log-probs as `rollout_log_probs`.
    """
    tokens = jnp.asarray(batch.input_tokens, jnp.int32)
    targets = jnp.asarray(batch.target_tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    segments = jnp.asarray(batch.target_mask, jnp.int32)
    arrays = {"rollout_log_probs": jnp.asarray(batch.logprobs, jnp.float32)} | arrays
    return RolloutBatch.from_target_aligned(
        tokens,
        targets,
        segments,
        positions,
        _mask(batch),
        num_segments=1,
        parallel=parallel,
        **arrays,
    )


def head_of(model: Any, params: Any) -> Head:
    """The head of simply's `TransformerLM`: its `embed_linear`, tied or not, with its bias and
    soft-cap.

    Args:
      model: the model, for its config.
      params: its parameters; call this inside the function that is differentiated.

    Raises:
      TypeError: parameters without an `embed_linear`, weights that are quantised.
    """
    if "embed_linear" not in params:
        expected = "the parameters of a TransformerLM, with embed_linear"
        raise TypeError(f"params: got {', '.join(params)}, expected {expected}")
    module = params["embed_linear"]
    kernel = _array(module["w"])
    bias = _array(module.get("b"))
    if not hasattr(kernel, "dtype"):
        got = f"embed_linear.w of {type(kernel).__name__}"
        raise TypeError(f"params: got {got}, expected an array that is not quantised")
    dtype = jnp.dtype(model.config.activation_dtype_name)
    if bias is not None:
        bias = bias.astype(dtype)
    softcap = model.config.output_logits_soft_cap
    if softcap <= 0:
        softcap = None
    return Head(kernel.astype(dtype), bias=bias, layout="vh", softcap=softcap)


def _array(parameter: Any) -> Any:
    """The array in an annotated parameter, or the parameter itself."""
    return getattr(parameter, "array", parameter)

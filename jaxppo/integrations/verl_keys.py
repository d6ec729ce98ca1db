"""The keys of verl's configuration: those that are translated, with verl's defaults, and what the others are about."""

from __future__ import annotations

from typing import Any

VERSION = "1dda039b"
ACTOR = "actor_rollout_ref.actor."
LOSS = "actor_rollout_ref.actor.policy_loss."
CORRECTION = "algorithm.rollout_correction."

# What is translated, or whose value is checked, with verl's defaults.
DEFAULTS: dict[str, Any] = {
    ACTOR + "clip_ratio": 0.2,
    ACTOR + "clip_ratio_low": 0.2,
    ACTOR + "clip_ratio_high": 0.2,
    ACTOR + "clip_ratio_c": 3.0,
    ACTOR + "tau_pos": 1.0,
    ACTOR + "tau_neg": 1.05,
    LOSS + "loss_mode": "vanilla",
    LOSS + "clip_cov_ratio": 2e-4,
    LOSS + "clip_cov_lb": 1.0,
    LOSS + "clip_cov_ub": 5.0,
    LOSS + "kl_cov_ratio": 2e-4,
    LOSS + "ppo_kl_coef": 0.1,
    LOSS + "dro_beta": None,
    ACTOR + "loss_agg_mode": "token-mean",
    ACTOR + "loss_scale_factor": None,
    ACTOR + "entropy_coeff": 0,
    ACTOR + "use_kl_loss": False,
    ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl",
    ACTOR + "calculate_sum_pi_squared": False,
    ACTOR + "use_dynamic_bsz": False,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    ACTOR + "ppo_micro_batch_size": None,
    ACTOR + "ppo_micro_batch_size_per_gpu": None,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_pf_ppo": False,
    CORRECTION + "rollout_is": None,
    CORRECTION + "rollout_is_threshold": 2.0,
    CORRECTION + "rollout_is_batch_normalize": False,
    CORRECTION + "rollout_rs": None,
    CORRECTION + "rollout_rs_threshold": None,
    CORRECTION + "bypass_mode": False,
    CORRECTION + "loss_type": "ppo_clip",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "distillation.enabled": False,
    "trainer.use_v1": True,
}

# What the other keys are about. A name that ends in a dot is a section, all of whose keys are about the same.
ELSEWHERE = {
    ACTOR + "calculate_entropy": "the entropy is always among the metrics",
    ACTOR + "ppo_mini_batch_size": "the prompts of one step, whose samples go to from_samples together",
    ACTOR + "rollout_n": "the samples of one prompt",
    ACTOR + "use_rollout_log_probs": "verl does not read it; rollout_correction.bypass_mode is what does so",
    LOSS + "rollout_correction.": "where verl copies algorithm.rollout_correction to",
    "actor_rollout_ref.model.": "the model; adapters of the head are LoRA(a, b, scale)",
    "actor_rollout_ref.model.mtp.": "the model; the loss is mtp_loss",
    "actor_rollout_ref.ref.": "forward passes: compute_log_probs",
    "actor_rollout_ref.rollout.": "the rollout engine",
    "algorithm.adv_estimator": "jaxppo.advantages",
    "algorithm.filter_groups.": "which samples are trained on",
    "algorithm.gamma": "gamma= of jaxppo.advantages",
    "algorithm.kl_ctrl.": "kl_coef= of advantages.token_rewards; adaptive_kl_coef",
    "algorithm.kl_penalty": "kl= of advantages.token_rewards",
    "algorithm.lam": "lam= of advantages.gae",
    "algorithm.norm_adv_by_std_in_grpo": "advantages.dr_grpo where it is False",
    "algorithm.pf_ppo.": "use_pf_ppo, refused",
    "algorithm.use_kl_in_reward": "advantages.token_rewards",
    "critic.": "the critic; its loss is value_loss",
    "data.": "the data set",
    "distillation.": "distillation.enabled, refused",
} | {
    name: reason
    for reason, names in {
        "adv_estimator='gdpo', refused": ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        "memory, which the head sees to": (
            ACTOR + "entropy_checkpointing",
            ACTOR + "entropy_from_logits_chunk_size",
            ACTOR + "entropy_from_logits_with_chunking",
        ),
        "forward passes: compute_log_probs": (
            ACTOR + "ppo_infer_max_token_len_per_gpu",
            ACTOR + "ppo_infer_micro_batch_size_per_gpu",
        ),
        "the optimizer": (ACTOR + "grad_clip", ACTOR + "optim."),
        "profiling": (ACTOR + "profile", ACTOR + "profiler.", "global_profiler."),
        "rewards": ("custom_reward_function.", "reward.", "reward_model.", "sandbox_fusion."),
        "the rollout engine": ("rollout.",),
        "the training loop": (
            ACTOR + "checkpoint.",
            ACTOR + "data_loader_seed",
            ACTOR + "ppo_epochs",
            ACTOR + "shuffle",
            "async_training.",
            "skip.",
            "trainer.",
        ),
        "the model": (
            ACTOR + "freeze_vision_tower",
            ACTOR + "model_config",
            ACTOR + "qat.",
            ACTOR + "router_replay.",
            ACTOR + "use_fused_kernels",
            ACTOR + "use_prefix_grouper",
            ACTOR + "use_torch_compile",
        ),
        "the training engine": (
            ACTOR + "engine",
            ACTOR + "fsdp_config.",
            ACTOR + "global_batch_info",
            ACTOR + "megatron.",
            ACTOR + "pad_to_length",
            ACTOR + "strategy",
            ACTOR + "torchtitan.",
            ACTOR + "ulysses_sequence_parallel_size",
            ACTOR + "use_remove_padding",
            ACTOR + "veomni.",
            "actor_rollout_ref.hybrid_engine",
            "actor_rollout_ref.nccl_timeout",
            "ray_kwargs.",
            "transfer_queue.",
        ),
    }.items()
    for name in names
}


def about(key: str) -> str | None:
    """What a key that is not translated is about, None where verl has no such key."""
    parts = key.split(".")
    if parts[-1] == "_target_":
        return "the class that verl makes of a section"
    names = (key, *(".".join(parts[:n]) + "." for n in range(len(parts), 0, -1)))
    return next((ELSEWHERE[name] for name in names if name in ELSEWHERE), None)

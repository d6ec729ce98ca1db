"""The keys of verl's configuration: the translated ones with defaults of verl 0.9.1, the others
with their subject.
"""

from __future__ import annotations

from typing import Any

from jaxppo.integrations.options import by_name

VERSION = "0.9.1"
ACTOR = "actor_rollout_ref.actor."
LOSS = "actor_rollout_ref.actor.policy_loss."
CORRECTION = "algorithm.rollout_correction."

# The keys that are translated, or whose value is checked, with verl's defaults.
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

# The subject of each other key. A name that ends in a dot is a section; all of its keys have the
# same subject.
ELSEWHERE = by_name(
    {
        "the entropy is always among the metrics": "calculate_entropy",
        "logit_stats= of log_probs_from_hidden": "calculate_sum_pi_squared",
        "the prompts of one step, whose samples go to from_samples together": (
            "ppo_mini_batch_size"
        ),
        "the samples of one prompt": "rollout_n",
        "verl does not read it; rollout_correction.bypass_mode is what does so": (
            "use_rollout_log_probs"
        ),
        "where verl copies algorithm.rollout_correction to": "policy_loss.rollout_correction.",
        "memory, which the head manages": """
            entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking
        """,
        "forward passes: compute_log_probs": (
            "ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu"
        ),
        "the optimizer": "grad_clip optim.",
        "profiling": "profile profiler.",
        "the training loop": "checkpoint. data_loader_seed ppo_epochs shuffle",
        "the model": """
            freeze_vision_tower model_config qat. use_fused_kernels use_prefix_grouper use_torch_compile
        """,
        "the training engine": """
            engine fsdp_config. global_batch_info megatron. pad_to_length strategy torchtitan.
            ulysses_sequence_parallel_size use_remove_padding veomni.
        """,
    },
    ACTOR,
) | by_name(
    {
        "the model; adapters of the head are LoRA(a, b, scale)": "actor_rollout_ref.model.",
        "the model; the loss is mtp_loss": "actor_rollout_ref.model.mtp.",
        "forward passes: compute_log_probs": "actor_rollout_ref.ref.",
        "the rollout engine": "actor_rollout_ref.rollout. rollout.",
        "jaxppo.advantages": "algorithm.adv_estimator",
        "which samples are trained on": "algorithm.filter_groups.",
        "gamma= of jaxppo.advantages": "algorithm.gamma",
        "kl_coef= of advantages.token_rewards; adaptive_kl_coef": "algorithm.kl_ctrl.",
        "kl= of advantages.token_rewards": "algorithm.kl_penalty",
        "lam= of advantages.gae": "algorithm.lam",
        "advantages.dr_grpo where it is False": "algorithm.norm_adv_by_std_in_grpo",
        "use_pf_ppo, refused": "algorithm.pf_ppo.",
        "advantages.token_rewards": "algorithm.use_kl_in_reward",
        "the critic; its loss is Value": "critic.",
        "the data set": "data.",
        "distillation.enabled, refused": "distillation.",
        "the rewards and weights= of advantages.gdpo": (
            "algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights"
        ),
        "profiling": "global_profiler.",
        "rewards": "custom_reward_function. reward. reward_model. sandbox_fusion.",
        "the training loop": "async_training. skip. trainer.",
        "the training engine": """
            actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout ray_kwargs. transfer_queue.
        """,
    }
)

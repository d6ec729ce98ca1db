"""The arguments of slime: those that are translated, with defaults, and remarks on the others;
slime at 624b824a.
"""

from __future__ import annotations

from typing import Any

from jaxppo.integrations.options import by_name

NAME = "slime"
VERSION = "624b824a"
ADVANTAGES = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"

# The arguments that are translated, or whose value is checked, with slime's defaults.
DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "calculate_per_token_loss": False,
    "custom_pg_loss_reducer_function_path": None,
    "custom_tis_function_path": None,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "eps_clip_high": None,
    "get_mismatch_metrics": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "loss_type": "policy_loss",
    "max_tokens_per_gpu": None,
    "micro_batch_size": 1,
    "opsm_delta": 1e-4,
    "rollout_max_context_len": None,
    "rollout_max_prompt_len": None,
    "rollout_max_response_len": None,
    "rollout_temperature": 1.0,
    "tis_clip": 2.0,
    "tis_clip_low": 0,
    "use_dynamic_batch_size": False,
    "use_kl_loss": False,
    "use_opsm": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "use_unbiased_kl": False,
}
# What slime's train_infer_mismatch_helper also reads, from the file of --custom-config-path; it has
# no defaults.
MISMATCH_HELPER = dict.fromkeys(
    [
        "tis_level",
        "tis_mode",
        "tis_lower_bound",
        "tis_upper_bound",
        "tis_batch_normalize",
        "use_rs",
        "rs_level",
        "rs_lower_bound",
        "rs_upper_bound",
        "rs_veto_threshold",
    ]
)
# Remarks on the other arguments. A name that ends in "_" stands for all names with that prefix.
ELSEWHERE = by_name(
    {
        "gamma= of jaxppo.advantages": "gamma",
        "lam= of advantages.gae": "lambd",
        "kl_coef= of advantages.token_rewards": "kl_coef",
        "advantages.dr_grpo where it is False": "grpo_std_normalization",
        "advantages.whiten": "normalize_advantages",
        "advantages.on_policy_distillation": (
            "use_opd opd_type opd_kl_coef opd_teacher_load opd_teacher_ckpt_step"
        ),
        "jaxppo.advantages": (
            "compute_advantages_and_returns custom_advantage_function_path rewards_normalization"
        ),
        "Value(clip=, factor=1.0)": "value_clip",
        "loss_type='custom_loss', refused": "custom_loss_function_path",
        "its keys, given beside the others": "custom_config_path",
        "the loss mask of the samples": """
            loss_mask_type mask_offpolicy_in_partial_rollout rollout_data_postprocess_path rollout_sample_filter_path
        """,
        "which samples are trained on": "buffer_filter_path dynamic_sampling_filter_path",
        "the extra routed_experts of the batch, for the model": (
            "use_rollout_routing_replay use_routing_replay"
        ),
        "old_log_probs, of the policy that this keeps: compute_log_probs": "keep_old_actor",
        "ref_log_probs, of this reference: compute_log_probs": (
            "ref_ckpt_step ref_load ref_update_interval"
        ),
        "nucleus_ids= of the head, where the sampler's nucleus is replayed": (
            "rollout_top_p rollout_top_k"
        ),
        "vocab_size= of the head": "padded_vocab_size",
        "mtp_loss": "enable_mtp_training mtp_loss_scaling_factor mtp_num_layers",
        "context_layout= of the mesh": "allgather_cp",
        "memory, which the head sees to": "log_probs_chunk_size recompute_loss_function",
        "forward passes: compute_log_probs": "log_probs_max_tokens_per_gpu use_rollout_entropy",
        "rows are always balanced by the tokens that carry loss": "balance_by_flops balance_data",
        "row_length=, a multiple of what the context layout needs": "data_pad_size_multiplier",
        "the samples of one step": (
            "global_batch_size n_samples_per_prompt num_steps_per_rollout rollout_batch_size"
        ),
        "the optimizer": """
            clip_grad freeze_params_name_list lr only_train_params_name_list reset_optimizer_states use_stateless_adam
        """,
        "the model": """
            custom_megatron_ custom_model_provider_path freeze_indexer hf_checkpoint load megatron_ model_name
            qwen_gdn_backend
        """,
        "the data set": """
            apply_chat_template apply_chat_template_kwargs data_source_path input_key label_key metadata_key
            multimodal_keys num_epoch prompt_data rollout_global_dataset rollout_seed rollout_shuffle start_rollout_id
            tool_key
        """,
        "rewards": """
            custom_convert_samples_to_train_data_path custom_reward_post_process_path custom_rm_path eval_reward_key
            group_rm reward_key rm_type rm_url
        """,
        "evaluation": "custom_eval_ eval_ n_samples_per_eval_prompt skip_eval_before_train",
        "workers": """
            actor_num_ colocate distributed_ num_gpus_per_node offload offload_ release_train rollout_num_ train_
        """,
        "the training loop": """
            async_save ci_ debug_ dump_details load_debug_ load_forge_rollout_data log_ memory_ no_save_optim
            num_critic_only_steps num_rollout profile_target record_memory_history save save_ seed tb_ use_tensorboard
            use_wandb wandb_
        """,
        "the rollout engine": """
            sglang_ router_ check_weight_update_ custom_generate_function_path custom_rollout_log_function_path
            custom_update_weight_ fetch_trajectory_retry_times http_proxy min_batch_collection_ratio
            over_sampling_batch_size partial_rollout rollout_all_samples_process_path rollout_buffer_url rollout_data_
            rollout_external_ rollout_function_path rollout_health_check_ rollout_sample_ rollout_skip_special_tokens
            rollout_stop rollout_stop_ rollout_task_type update_weight_ update_weights_interval use_distributed_post
            use_fault_tolerance
        """,
    }
)
# Megatron's arguments that add to the gradient beside the loss. slime hands them on, as it does all
# of Megatron's.
OF_MEGATRON = by_name(
    {
        "a loss of the model's routers beside the policy loss: jaxppo.step.terms": (
            "moe_aux_loss_coeff moe_z_loss_coeff"
        )
    }
)

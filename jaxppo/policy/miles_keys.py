"""The arguments of miles: those of slime that it kept, and its own."""

from __future__ import annotations

from jaxppo.policy import slime_keys
from jaxppo.policy.options import by_name

NAME, VERSION = "miles", "31f1ca96"
DEFAULTS = slime_keys.DEFAULTS | {"skip_actor_forward_only": False}
MISMATCH_HELPER = slime_keys.MISMATCH_HELPER
ADVANTAGES = tuple(x for x in slime_keys.ADVANTAGES if x != "cispo")
ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
ELSEWHERE = slime_keys.ELSEWHERE | by_name(
    {
        "advantages.on_policy_distillation": """
            opd_log_prob_top_k opd_reward_weight_mode opd_teacher_key opd_teacher_urls opd_top_k_strategy
            opd_topk_per_position
        """,
        "Value and its optimizer": "critic_",
        "entropy is always a metric": "observe_training_entropy",
        "LoRA of the head, and adapters of the model": """
            lora_ exclude_modules experts_shared_outer_loras target_modules
        """,
        "adapters by row: adapter_ids=": "multi_lora_",
        "jaxppo.step.staleness": "max_weight_staleness",
        "the context layout and the rows of a batch": "qkv_format delay_split_train_data_by_dp",
        "the samples of one step": "allow_partial_train_step use_dynamic_global_batch_size",
        "log-probs of one program: Head(logits_dtype=)": "true_on_policy_mode recompute_logprobs_via_prefill",
        "the model": """
            chat_template_path dsa_attention_backend extra_high_precision_layers_hf
            extra_high_precision_layers_megatron linear_attention_backend megatron_to_hf_mode miles_dsa_topk_backend
            use_indexer_replay use_rollout_indexer_replay
        """,
        "evaluation": "eval_",
        "the rollout engine": """
            async_ check_weight_update_ custom_async_data_buffer_path disable_rollout_trim_samples fully_async
            miles_router_ p2p_transfer_ pause_generation_mode prefill_num_servers rollout_external
            rollout_submission_granularity session_ tito_model update_weight_transfer_mode use_miles_router
            use_session_server
        """,
        "the training loop": """
            check_lora_weight_equal check_rematerialize_param_from_master_weight ci_ control_server_port
            custom_megatron_post_save_hook_path debug_ dumper_ enable_event_analyzer enable_witness env_report
            ft_components indep_dp low_memory_resume mfu_peak_tflops mini_ft_ mlflow_ mooncake_ object_store_backend
            offload_ pin_rollout_manager_to_head prometheus_ rematerialize_param_from_master_weight
            save_debug_event_data save_debug_trajectory_data save_local_weight_checksum save_trigger_sentinel
            stream_optimizer_state_ train_memory_margin_bytes use_mlflow use_prometheus witness_buffer_size
        """,
    }
)

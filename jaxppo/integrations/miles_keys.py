"""The arguments of miles: those of slime that it kept, and its own."""

from __future__ import annotations

from jaxppo.integrations import slime_keys
from jaxppo.integrations.options import by_name

NAME = "miles"
VERSION = "31f1ca96"
DEFAULTS = slime_keys.DEFAULTS | {"skip_actor_forward_only": False}
MISMATCH_HELPER = slime_keys.MISMATCH_HELPER
ADVANTAGES = tuple(name for name in slime_keys.ADVANTAGES if name != "cispo")
ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
ELSEWHERE = slime_keys.ELSEWHERE | by_name(
    {
        "advantages.on_policy_distillation": "opd_teacher_key opd_teacher_urls",
        "top_k_divergence; advantages.on_policy_distillation takes the sampled token alone": """
            opd_log_prob_top_k opd_reward_weight_mode opd_top_k_strategy opd_topk_per_position
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
        "log-probs of one program: Head(logits_dtype=)": (
            "true_on_policy_mode recompute_logprobs_via_prefill"
        ),
        "the model": """
            chat_template_path dsa_attention_backend extra_high_precision_layers_ linear_attention_backend
            miles_dsa_topk_backend use_indexer_replay use_rollout_indexer_replay
        """,
        "the rollout engine": """
            async_ custom_async_ disable_rollout_trim_samples fully_async miles_router_ p2p_transfer_
            pause_generation_mode prefill_num_servers rollout_external rollout_submission_granularity session_
            tito_model use_miles_router use_session_server
        """,
        "the training loop": """
            check_lora_weight_equal check_rematerialize_param_ control_server_port dumper_ enable_event_analyzer
            enable_witness env_report ft_components indep_dp low_memory_resume mfu_peak_tflops mini_ft_ mlflow_
            mooncake_ object_store_backend pin_rollout_manager_to_head prometheus_ rematerialize_param_
            stream_optimizer_state_ use_mlflow use_prometheus witness_buffer_size
        """,
    }
)

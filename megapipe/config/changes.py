"""The class of every configuration field: the meaning of its change for a run that continues from a checkpoint.

`checkpoint.changes` compares a run with a checkpoint by these classes, and `--use-checkpoint-args` takes the fields of
the model's function from it.
"""

from __future__ import annotations

from functools import cache

from megapipe.config.config import all_fields

FUNCTION = "function"  # what the model computes from its weights
OPTIMIZER = "optimizer"  # how gradients become updates, and the state that this needs
DATA = "data"  # the samples, and how they are read
LOSS = "loss"  # what is minimized, and in which precision
SCHEDULE = "schedule"  # length, batch, rates and random streams of the run
NEUTRAL = "neutral"  # results are the same up to rounding and the reduction order of the grid, or not affected

# class -> section -> fields
TABLE = {
    FUNCTION: {
        "model": """
            num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
            position_embedding_type rotary_base rotary_percent rope_scaling_type rope_scaling_factor
            rope_low_freq_factor rope_high_freq_factor rope_original_max_position_embeddings yarn_beta_fast
            yarn_beta_slow yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int
            yarn_query_scale no_rope_freq nope_query_scale nope_query_scale_length
            normalization norm_position norm_epsilon layernorm_zero_centered_gamma activation glu_linear_offset
            activation_func_clamp_value add_bias_linear add_qkv_bias untie_embeddings_and_output_weights
            embedding_scale residual_scale logits_scaling qk_layernorm qk_layernorm_scope qk_layernorm_after_rope
            qk_l2_norm attention_output_gate window_size window_attn_skip_freq layer_pattern
            multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
            latent_norm_epsilon num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
            moe_shared_expert_gate moe_router_topk moe_router_score_function moe_router_pre_softmax
            moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
            moe_router_norm_topk_prob moe_router_group_score_topk moe_apply_probs_on_input
            mtp_num_layers attn_logit_softcapping final_logit_softcapping attention_kind attention_options
            softmax_type softmax_scale
        """,
    },
    OPTIMIZER: {
        "parallel": "pipeline_schedule",  # synchronous ones are alike
        "optimizer": """
            optimizer clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum muon_momentum muon_nesterov
            muon_coefficient_type muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_no_split_qkv
            muon_fp32_matmul_prec optimizer_options freeze main_grads_dtype exp_avg_dtype exp_avg_sq_dtype
        """,
    },
    DATA: {
        "model": "seq_length",
        "data": """
            data_path split train_data_path dataset dataset_options mock_data dataloader_type data_sharding
            reset_position_ids reset_attention_mask sft sft_tokenizer_prompt_format sft_packing sft_overlong
            tokenizer_type tokenizer_model vocab_file merge_file
        """,
    },
    LOSS: {
        "model": """
            moe_router_dtype moe_router_bias_update_rate moe_router_force_load_balancing moe_expert_capacity_factor
            moe_token_drop_policy moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
            mtp_loss_scaling_factor attention_softmax_in_fp32 hidden_dropout attention_dropout
        """,
        "parallel": "grad_reduce_in_bf16",
        # the microbatch's size where something is computed over a microbatch (checkpoint.changes)
        "training": "micro_batch_size label_smoothing z_loss calculate_per_token_loss",
        "precision": """
            dtype loss_scale min_loss_scale loss_scale_window hysteresis fp8_format fp8_recipe fp8_margin
            fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 num_layers_at_start_in_bf16
            num_layers_at_end_in_bf16
        """,
        "data": "eod_mask_loss",
    },
    SCHEDULE: {
        "training": """
            global_batch_size rampup_batch_size step_batch_size_schedule train_iters train_samples seed spike_rollback
            spike_threshold spike_steps spike_window spike_limit
        """,
        "optimizer": """
            lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_iters
            lr_warmup_samples lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples weight_decay
            start_weight_decay end_weight_decay weight_decay_incr_style decoupled_lr decoupled_min_lr
        """,
    },
    NEUTRAL: {
        # the padding of the vocabulary is masked out of the softmax; a table of positions has its own shape
        "model": """
            max_position_embeddings padded_vocab_size make_vocab_size_divisible_by moe_pad_expert_input_to_capacity
            moe_token_dispatcher_type moe_combine_in_node moe_flex_dispatcher_backend init_method_std
        """,
        # of extensions the content is compared, by train.state
        "training": """
            exit_interval exit_duration_in_mins exit_signal_handler skip_train eval_interval
            eval_iters manual_gc manual_gc_interval manual_gc_eval deterministic_mode cross_entropy_chunk_size
            check_for_nan_in_loss_and_grad check_weight_hash_across_dp_replicas_interval extension device
        """,
        "optimizer": """
            muon_tp_mode optimizer_cpu_offload use_precision_aware_optimizer
            override_opt_param_scheduler use_checkpoint_opt_param_scheduler
        """,
        "precision": "initial_loss_scale",  # the scale itself is in the checkpoint
        "data": "valid_data_path test_data_path data_cache_path num_workers",
    },
}
# all fields of these that have no class above
NEUTRAL_SECTIONS = ("parallel", "recompute", "offload", "kernels", "checkpoint", "logging", "gpu")


@cache
def classes() -> dict[str, str]:
    """Return 'section.name' -> class, in the order of the table."""
    rows = [(kind, section, names.split()) for kind, sections in TABLE.items() for section, names in sections.items()]
    named = {f"{section}.{name}": kind for kind, section, names in rows for name in names}
    return named | {
        field.key: NEUTRAL for field in all_fields() if field.section in NEUTRAL_SECTIONS and field.key not in named
    }

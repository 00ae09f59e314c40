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

CLASSES = (FUNCTION, OPTIMIZER, DATA, LOSS, SCHEDULE, NEUTRAL)

# section -> the class of its fields; those of the other sections are neutral
OF_SECTION = {"model": FUNCTION, "optimizer": OPTIMIZER, "data": DATA, "precision": LOSS, "training": SCHEDULE}
# class -> section -> the fields that have this class instead
EXCEPTIONS = {
    OPTIMIZER: {"parallel": "pipeline_schedule"},  # synchronous ones are alike
    DATA: {"model": "seq_length"},
    LOSS: {
        "model": """
            moe_router_dtype moe_router_bias_update_rate moe_router_force_load_balancing moe_expert_capacity_factor
            moe_token_drop_policy moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
            mtp_loss_scaling_factor attention_softmax_in_fp32 hidden_dropout attention_dropout
        """,
        "parallel": "grad_reduce_in_bf16",
        # the microbatch's size where something is computed over a microbatch (checkpoint.changes)
        "training": "micro_batch_size label_smoothing z_loss calculate_per_token_loss",
        "data": "eod_mask_loss",
    },
    SCHEDULE: {
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


@cache
def classes() -> dict[str, str]:
    """Return 'section.name' -> class."""
    rows = [(kind, *row) for kind, sections in EXCEPTIONS.items() for row in sections.items()]
    exceptions = {f"{section}.{name}": kind for kind, section, names in rows for name in names.split()}
    return {field.key: exceptions.get(field.key, OF_SECTION.get(field.section, NEUTRAL)) for field in all_fields()}

"""Settings that Megatron-Core derives from flags, beside those that megapipe derives from the same flags.

fixtures/megatron_settings/settings.jsonl.xz has the settings of Megatron 0.19.2 for 1,000 random sets of flags, written
by tools/megatron_settings.py. `ROWS` says where each of them is in a plan; `NOT_COMPARED` names those that have no
counterpart, with the reason, and `DIFFERENCES` those that differ on purpose.
`python -m tests.config.megatron_settings` writes the table of docs/migrate.md again.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megapipe.config.layers import expert_layers, layer_configs
from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.optimizer.schedule import lr_schedule, weight_decay_schedule
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan

FIXTURE = Path(__file__).parents[1] / "fixtures" / "megatron_settings" / "settings.jsonl.xz"
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
BEGIN, END = "<!-- table of derived settings -->\n", "<!-- end of the derived settings -->\n"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "uint8": "fp8"}
ACTIVATIONS = {  # (function, gated, fused) -> ours; fused GELU is the tanh form
    ("gelu", False, True): "gelu_tanh",
    ("gelu", False, False): "gelu",
    ("silu", True, True): "swiglu",
    ("silu", True, False): "swiglu",
    ("quick_gelu", True, True): "quick_geglu",
    ("quick_gelu", True, False): "quick_geglu",
    ("squared_relu", False, False): "squared_relu",
}
Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One set of flags. settings: Megatron's, None if it refuses the flags."""

    ranks: int
    flags: str
    settings: Settings | None

    def plan(self) -> RunPlan:
        """Return megapipe's plan. Raises ConfigError."""
        return resolve(load_config(self.flags.split()).config, self.ranks, min(self.ranks, 8))


@cache
def lines() -> tuple[Settings, ...]:
    """Return what most sets have in common, then each set with what differs."""
    text = lzma.decompress(FIXTURE.read_bytes()).decode()
    return tuple(json.loads(line) for line in text.splitlines())


@cache
def cases() -> tuple[Case, ...]:
    """Return all sets of flags."""
    common, *others = lines()
    found = []
    for one in others:
        settings = None
        if one["settings"] is not None:
            settings = {name: value for name, value in (common | one["settings"]).items() if value != "absent"}
        found.append(Case(one["ranks"], one["flags"], settings))
    return tuple(found)


def varying() -> set[str]:
    """Return the settings that are not the same for all sets of flags."""
    return {name for one in lines()[1:] for name in one["settings"] or ()}


@dataclass(frozen=True)
class Row:
    """One setting, or some that mean one thing together.

    ours, theirs: the value in the same terms; theirs is by default the setting itself. applies: whether it has an
    effect, by default always.
    """

    names: tuple[str, ...]
    ours: Callable[[RunPlan], Any]
    theirs: Callable[[Settings], Any] | None = None
    applies: Callable[[RunPlan], bool] = lambda plan: True

    def value(self, settings: Settings) -> Any:
        """Return Megatron's value."""
        return settings[self.names[0]] if self.theirs is None else self.theirs(settings)


def of_section(section: str, prefix: str, names: str, **others: Any) -> Iterator[Row]:
    """Yield rows of settings that have the same name and the same values here."""
    for name in names.split():
        yield Row((f"{prefix}.{name}",), lambda plan, name=name: getattr(getattr(plan.config, section), name), **others)


def dtype_of(name: str) -> Callable[[Settings], Any]:
    """Return a function that gives our name of a dtype."""
    return lambda settings: DTYPES[settings[name]]


def has_experts(plan: RunPlan) -> bool:
    return plan.config.model.num_experts is not None


def is_latent(plan: RunPlan) -> bool:
    return plan.config.model.multi_latent_attention


def is_rotary(plan: RunPlan) -> bool:
    return plan.config.model.position_embedding_type == "rope"


def is_interleaved(plan: RunPlan) -> bool:
    return plan.config.parallel.num_virtual_stages_per_pipeline_rank > 1


def is_fused_swiglu(settings: Settings) -> bool:
    """Return True for the kernel that clamps nothing."""
    return settings["model.activation_func"] == "silu" and settings["model.bias_activation_fusion"]


def their_scaling(settings: Settings) -> Any:
    """Return how rotary frequencies are scaled; YaRN by 1, the default of latent attention, changes nothing."""
    if settings["model.multi_latent_attention"]:
        names = "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
        values = tuple(float(settings[f"model.{name}"]) for name in names.split())
        return ("yarn", *values) if settings["model.rope_type"] == "yarn" and values[0] != 1 else ("none",)
    if settings["gpt.rope_scaling"]:
        return "llama3", settings["gpt.rope_scaling_factor"]
    factor = settings["gpt.seq_len_interpolation_factor"]
    return ("none",) if factor is None else ("linear", float(factor))


def our_scaling(plan: RunPlan) -> Any:
    model = plan.config.model
    factor, kind = model.rope_scaling_factor, model.rope_scaling_type
    if kind == "yarn":
        length = float(model.rope_original_max_position_embeddings)
        mscales = model.yarn_mscale, model.yarn_mscale_all_dim
        return kind, factor, length, model.yarn_beta_fast, model.yarn_beta_slow, *mscales
    return (kind,) if kind == "none" else (kind, factor)


def their_marks(name: str) -> Callable[[Settings], Any]:
    """Return a function that gives the layers that a list marks."""
    return lambda settings: [layer for layer, mark in enumerate(settings[name] or ()) if mark]


def their_expert_layers(settings: Settings) -> Any:
    freq, layers = settings["model.moe_layer_freq"], range(settings["model.num_layers"])
    return [layer for layer in layers if (freq[layer] if isinstance(freq, list) else layer % freq == 0)]


def our_expert_layers(plan: RunPlan) -> Any:
    return [layer for layer in expert_layers(plan.config.model) if layer < plan.config.model.num_layers]


def their_windows(settings: Settings) -> Any:
    size, freq = settings["model.window_size"], settings["model.window_attn_skip_freq"]
    layers = range(settings["model.num_layers"])
    has_window = [freq is None or (freq[n] if isinstance(freq, list) else (n + 1) % freq != 0) for n in layers]
    return [size[0] + 1 if size is not None and has_window[layer] else None for layer in layers]


def their_balance(settings: Settings) -> Any:
    kinds, factors = settings["model.moe_router_load_balancing_type"], settings["model.moe_aux_loss_coeff"]
    pairs = zip(kinds, factors, strict=True) if isinstance(kinds, list) else [(kinds, factors)]
    return {kind: factor for kind, factor in pairs if factor and kind != "none"}


def their_recompute(settings: Settings) -> Any:
    granularity = settings["model.recompute_granularity"]
    if granularity == "selective":
        return granularity, sorted(settings["model.recompute_modules"])
    return granularity, settings["model.recompute_method"], settings["model.recompute_num_layers"]


def our_recompute(plan: RunPlan) -> Any:
    recompute = plan.config.recompute
    if recompute.recompute_granularity == "selective":
        return "selective", sorted(recompute.recompute_modules)
    return recompute.recompute_granularity, recompute.recompute_method, recompute.recompute_num_layers


def their_gradients(settings: Settings) -> Any:
    """Return the dtype in which gradients are summed over microbatches, and reduced."""
    if settings["ddp.grad_reduce_in_fp32"]:
        return "fp32", "fp32"
    params = DTYPES[settings["model.params_dtype"]]
    main = DTYPES[settings["optimizer.main_grads_dtype"]]
    return main if settings["optimizer.use_precision_aware_optimizer"] else "fp32", params


def our_gradients(plan: RunPlan) -> Any:
    config = plan.config
    main = config.optimizer.main_grads_dtype
    return main, "bf16" if config.parallel.grad_reduce_in_bf16 else main


def our_bucket(plan: RunPlan) -> Any:
    size = plan.config.parallel.ddp_bucket_size
    return None if size == max(40_000_000, 1_000_000 * plan.topology.dp) else size


def rows() -> Iterator[Row]:
    """Yield the rows."""
    yield from rows_of_the_model()
    yield from rows_of_positions()
    yield from rows_of_precision()
    yield from rows_of_experts()
    yield from rows_of_the_grid()
    yield from rows_of_training()


def rows_of_the_model() -> Iterator[Row]:
    """Yield the rows of a dense model."""
    function = ("model.activation_func", "model.gated_linear_unit", "model.bias_activation_fusion")
    yield Row(
        function,
        lambda plan: plan.config.model.activation,
        lambda settings: ACTIVATIONS[tuple(settings[name] for name in function)],  # type: ignore[index]
    )
    yield from of_section(
        "model",
        "model",
        "num_layers hidden_size num_attention_heads ffn_hidden_size add_bias_linear layernorm_zero_centered_gamma "
        "normalization hidden_dropout attention_dropout init_method_std softmax_type qk_layernorm glu_linear_offset "
        "multi_latent_attention mtp_num_layers attention_softmax_in_fp32",
    )
    yield Row(
        ("model.activation_func_clamp_value",),
        lambda plan: plan.config.model.activation_func_clamp_value,
        lambda settings: None if is_fused_swiglu(settings) else settings["model.activation_func_clamp_value"],
    )
    yield Row(("model.embedding_init_method_std",), lambda plan: plan.config.model.init_method_std)
    yield Row(("model.layernorm_epsilon",), lambda plan: plan.config.model.norm_epsilon)
    yield Row(("model.add_qkv_bias",), lambda plan: plan.config.model.add_qkv_bias or plan.config.model.add_bias_linear)
    yield from of_section("model", "model", "num_query_groups kv_channels", applies=lambda plan: not is_latent(plan))
    latent = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
    yield from of_section("model", "model", latent, applies=is_latent)
    yield from of_section(
        "model", "model", "mtp_loss_scaling_factor", applies=lambda plan: plan.config.model.mtp_num_layers is not None
    )
    yield from of_section("model", "gpt", "make_vocab_size_divisible_by")
    yield Row(("gpt.vocab_size",), lambda plan: plan.config.model.padded_vocab_size)
    yield Row(("gpt.seq_length",), lambda plan: plan.config.model.max_position_embeddings)
    yield Row(
        ("gpt.share_embeddings_and_output_weights",),
        lambda plan: not plan.config.model.untie_embeddings_and_output_weights,
    )


def rows_of_positions() -> Iterator[Row]:
    """Yield the rows of positions and windows."""
    yield Row(("gpt.position_embedding_type",), lambda plan: plan.config.model.position_embedding_type)
    for name in ("rotary_base", "rotary_percent"):
        yield Row(
            (f"gpt.{name}", f"model.{name}"),
            lambda plan, name=name: getattr(plan.config.model, name),
            lambda settings, name=name: settings.get(f"model.{name}", settings[f"gpt.{name}"]),  # of latent attention
            is_rotary,
        )
    names = "gpt.rope_scaling gpt.rope_scaling_factor gpt.seq_len_interpolation_factor model.rope_type "
    names += "model.rotary_scaling_factor model.original_max_position_embeddings model.beta_fast model.beta_slow "
    names += "model.mscale model.mscale_all_dim"
    yield Row(tuple(names.split()), our_scaling, their_scaling, is_rotary)
    yield Row(
        ("model.no_rope_freq",),
        lambda plan: [
            number
            for number, layer in enumerate(layer_configs(plan.config.model))
            if layer.position_embedding_type != "rope"
        ],
        their_marks("model.no_rope_freq"),
        is_rotary,
    )
    yield Row(
        ("model.window_size", "model.window_attn_skip_freq"),
        lambda plan: [layer.window_size for layer in layer_configs(plan.config.model)],
        their_windows,
    )


def rows_of_precision() -> Iterator[Row]:
    """Yield the rows of precision."""
    for name in ("model.params_dtype", "model.pipeline_dtype", "optimizer.params_dtype"):
        yield Row((name,), lambda plan: plan.config.precision.dtype, dtype_of(name))
    for section in ("model", "optimizer"):
        for dtype in ("bf16", "fp16"):
            yield Row((f"{section}.{dtype}",), lambda plan, dtype=dtype: plan.config.precision.dtype == dtype)
    yield Row(("model.fp8",), lambda plan: plan.config.precision.fp8_format)
    fp8 = "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 "
    fp8 += "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
    yield from of_section("precision", "model", fp8, applies=lambda plan: plan.config.precision.fp8_format is not None)


def rows_of_experts() -> Iterator[Row]:
    """Yield the rows of experts."""
    yield Row(("model.num_moe_experts",), lambda plan: plan.config.model.num_experts)
    yield from of_section(
        "model",
        "model",
        "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk "
        "moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups "
        "moe_router_group_topk moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate "
        "moe_router_force_load_balancing moe_expert_capacity_factor moe_token_drop_policy "
        "moe_pad_expert_input_to_capacity moe_token_dispatcher_type moe_z_loss_coeff",
        applies=has_experts,
    )
    yield Row(("model.moe_layer_freq",), our_expert_layers, their_expert_layers, has_experts)
    balance = ("model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff")
    yield Row(balance, lambda plan: plan.config.model.balance_losses, their_balance, has_experts)
    yield Row(("model.moe_grouped_gemm",), lambda plan: plan.config.kernels.moe_grouped_gemm, None, has_experts)
    yield from of_section("parallel", "model", "overlap_moe_expert_parallel_comm", applies=has_experts)
    yield Row(("model.expert_model_parallel_size",), lambda plan: plan.topology.ep)
    yield Row(("model.expert_tensor_parallel_size",), lambda plan: plan.topology.etp, None, has_experts)


def rows_of_the_grid() -> Iterator[Row]:
    """Yield the rows of the grid, of recompute and of what overlaps."""
    yield from of_section(
        "parallel",
        "model",
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    )
    yield Row(
        ("model.hierarchical_context_parallel_sizes",),
        lambda plan: plan.config.parallel.hierarchical_context_parallel_sizes,
        lambda settings: (
            sizes and tuple(sizes) if (sizes := settings["model.hierarchical_context_parallel_sizes"]) else None
        ),
    )
    yield Row(
        ("model.cp_comm_type",),
        lambda plan: list(plan.config.parallel.cp_comm_type),
        lambda settings: [kind] if isinstance(kind := settings["model.cp_comm_type"], str) else kind,
        lambda plan: plan.topology.cp > 1,
    )
    yield Row(
        ("model.virtual_pipeline_model_parallel_size",),
        lambda plan: plan.config.parallel.num_virtual_stages_per_pipeline_rank,
        lambda settings: settings["model.virtual_pipeline_model_parallel_size"] or 1,
    )
    yield Row(
        ("model.microbatch_group_size_per_vp_stage",),
        lambda plan: plan.config.parallel.microbatch_group_size_per_virtual_pipeline_stage,
        None,
        is_interleaved,
    )
    for end in ("first", "last"):
        yield Row(
            (f"model.num_layers_in_{end}_pipeline_stage",),
            lambda plan, end=end: getattr(plan.config.parallel, f"decoder_{end}_pipeline_num_layers"),
        )
    recompute = ("granularity", "method", "num_layers", "modules")
    yield Row(tuple(f"model.recompute_{name}" for name in recompute), our_recompute, their_recompute)
    yield from of_section("offload", "model", "cpu_offloading_num_layers")
    yield Row(("model.cpu_offloading",), lambda plan: plan.config.offload.cpu_offloading_num_layers > 0)
    yield from of_section("gpu", "model", "cuda_graph_impl")
    yield from of_section("parallel", "model", "tp_comm_overlap")
    yield from of_section(
        "parallel", "ddp", "overlap_grad_reduce overlap_param_gather num_distributed_optimizer_instances"
    )
    yield from of_section("parallel", "optimizer", "overlap_param_gather")
    for name in ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"):
        yield Row(
            (name, "optimizer.use_layer_wise_distributed_optimizer"),
            lambda plan: plan.config.parallel.use_distributed_optimizer,
            lambda settings, name=name: settings[name] or settings["optimizer.use_layer_wise_distributed_optimizer"],
        )
    yield Row(("ddp.bucket_size",), our_bucket)
    yield Row(("args.data_parallel_size",), lambda plan: plan.topology.dp)


def rows_of_training() -> Iterator[Row]:
    """Yield the rows of batch, length, optimizer and rates."""
    yield from of_section(
        "training",
        "args",
        "global_batch_size micro_batch_size train_iters seed skip_train eval_iters eval_interval exit_interval "
        "exit_duration_in_mins manual_gc manual_gc_eval manual_gc_interval",
    )
    yield Row(("args.eval_global_batch_size",), lambda plan: plan.config.training.global_batch_size)
    yield Row(("args.eval_micro_batch_size",), lambda plan: plan.config.training.micro_batch_size)
    yield Row(("args.seq_length",), lambda plan: plan.config.model.seq_length)
    yield Row(("args.max_position_embeddings",), lambda plan: plan.config.model.max_position_embeddings)
    yield Row(("args.save_interval",), lambda plan: plan.config.checkpoint.save_interval)
    yield Row(("args.split",), lambda plan: plan.config.data.split)
    yield from of_section("training", "model", "calculate_per_token_loss deterministic_mode")
    yield Row(("ddp.check_for_nan_in_grad",), lambda plan: plan.config.training.check_for_nan_in_loss_and_grad)
    yield Row(
        ("num_microbatches",),
        lambda plan: plan.batch.full // (plan.config.training.micro_batch_size * plan.topology.dp),
    )
    yield Row(("ddp.grad_reduce_in_fp32", "optimizer.main_grads_dtype"), our_gradients, their_gradients)
    yield from of_section(
        "optimizer",
        "optimizer",
        "optimizer lr min_lr weight_decay clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum muon_momentum "
        "muon_scale_mode muon_num_ns_steps muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec "
        "muon_nesterov use_precision_aware_optimizer",
    )
    yield Row(
        ("optimizer.muon_tp_mode",),
        lambda plan: plan.config.optimizer.muon_tp_mode,
        None,
        lambda plan: plan.config.optimizer.optimizer == "muon" and plan.topology.tp > 1,
    )
    yield Row(("optimizer.muon_split_qkv",), lambda plan: not plan.config.optimizer.muon_no_split_qkv)
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        yield Row(
            (f"optimizer.{name}",),
            lambda plan, name=name: getattr(plan.config.optimizer, name),
            dtype_of(f"optimizer.{name}"),
        )
    yield Row(("optimizer.main_params_dtype",), lambda plan: "fp32", dtype_of("optimizer.main_params_dtype"))
    for name, least in (("decoupled_lr", "lr"), ("decoupled_min_lr", "min_lr")):
        yield Row(
            (f"optimizer.{name}",),
            lambda plan, name=name: getattr(plan.config.optimizer, name),
            lambda settings, name=name, least=least: settings[
                "optimizer." + (name if settings[f"optimizer.{name}"] else least)
            ],
        )
    scaler = "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    yield from of_section("precision", "optimizer", scaler, applies=lambda plan: plan.config.precision.dtype == "fp16")
    yield from rows_of_rates()


def rows_of_rates() -> Iterator[Row]:
    """Yield the rows of the schedules of learning rate and weight decay, in samples."""
    rates = "max_lr init_lr min_lr lr_warmup_steps:warmup_samples lr_decay_steps:decay_samples lr_decay_style:style "
    rates += "lr_wsd_decay_style:wsd_style"
    for pair in rates.split():
        name, _, mine = pair.partition(":")
        yield Row(
            (f"schedule.{name}",),
            lambda plan, mine=mine or name: getattr(lr_schedule(plan.config.optimizer, plan.config.training), mine),
        )
    yield Row(
        ("schedule.wsd_decay_steps",),
        lambda plan: lr_schedule(plan.config.optimizer, plan.config.training).wsd_samples or None,
    )
    for pair in "start_wd:start end_wd:end wd_incr_style:style wd_incr_steps:ramp_samples".split():
        name, _, mine = pair.partition(":")
        yield Row(
            (f"schedule.{name}",),
            lambda plan, mine=mine: getattr(weight_decay_schedule(plan.config.optimizer, plan.config.training), mine),
        )
    yield from of_section("optimizer", "schedule", "override_opt_param_scheduler")


NOT_COMPARED = {  # reason -> settings that vary
    "a choice among kernels or transports with the same results": (
        "model.apply_rope_fusion model.attention_backend model.batch_p2p_comm model.overlap_p2p_comm "
        "ddp.align_param_gather model.apply_query_key_layer_scaling model.mla_down_proj_fusion model.moe_permute_fusion"
    ),
    "a second form of settings that are compared": (
        "args.add_position_embedding gpt.transformer model.tensor_parallel_num_weight_shards "
        "model.expert_tensor_parallel_num_weight_shards model.pipeline_model_parallel_layout optimizer.fp8_recipe "
        "model.moe_layer_recompute"
    ),
    "not read in training without FSDP": (
        "model.autocast_dtype model.inference_sampling_seed model.inference_cuda_graph_scope model.cache_mla_latents "
        "ddp.megatron_fsdp_use_decoupled_grad"
    ),
}


@dataclass(frozen=True)
class KnownDifference:
    """A setting that differs on purpose where `when` holds."""

    name: str  # the first name of its row
    when: Callable[[Settings, Case], bool]
    megatron: str
    here: str


def has(*flags: str) -> Callable[[Settings, Case], bool]:
    """Return a condition: one of these flags is given."""
    return lambda settings, case: any(flag in case.flags.split() for flag in flags)


def lacks(flag: str) -> Callable[[Settings, Case], bool]:
    """Return a condition: this flag is not given."""
    return lambda settings, case: flag not in case.flags.split()


RAMP = "not read in 0.19, though accepted"
DIFFERENCES = (
    KnownDifference("args.eval_interval", lacks("--eval-interval"), "never evaluates by default", "every 1000 steps"),
    KnownDifference(
        "model.moe_token_dispatcher_type", lacks("--moe-token-dispatcher-type"), "allgather by default", "alltoall"
    ),
    KnownDifference(
        "model.moe_grouped_gemm",
        lacks("--moe-grouped-gemm"),
        "experts are multiplied one by one by default",
        "in one kernel where the GPU has one: the same products",
    ),
    KnownDifference(
        "gpt.rope_scaling", has("--rope-scaling-factor"), "--use-rope-scaling always scales by 8", "by the given factor"
    ),
    KnownDifference(
        "gpt.rope_scaling",
        has("--yarn-original-max-position-embeddings", "--yarn-beta-fast"),
        "not read with latent attention",
        "read",
    ),
    KnownDifference(
        "model.activation_func_clamp_value",
        has("--activation-func-clamp-value"),
        "fused SwiGLU clamps nothing",
        "the given clamp",
    ),
    KnownDifference(
        "ddp.grad_reduce_in_fp32",
        lambda settings, case: "--fp16" in case.flags and "--accumulate-allreduce-grads-in-fp32" not in case.flags,
        "--fp16: gradients are summed and reduced in fp16",
        "in fp32",
    ),
    KnownDifference(
        "ddp.check_for_nan_in_grad",
        lambda settings, case: "--fp16" in case.flags and settings["optimizer.loss_scale"] is None,
        "--fp16: no check with a dynamic loss scale",
        "the check looks at steps that the loss scaler does not skip",
    ),
    KnownDifference(
        "model.attention_softmax_in_fp32",
        has("--apply-query-key-layer-scaling"),
        "--apply-query-key-layer-scaling turns it on",
        "no effect: kernels compute the softmax in fp32 anyway",
    ),
    KnownDifference("model.fp8_recipe", lacks("--fp8-recipe"), "delayed by default", "tensorwise"),
    KnownDifference("args.train_iters", has("--rampup-batch-size"), RAMP, "steps count the smaller batches"),
    KnownDifference("schedule.lr_warmup_steps", has("--rampup-batch-size"), RAMP, "steps count the smaller batches"),
    KnownDifference("schedule.lr_decay_steps", has("--rampup-batch-size"), RAMP, "steps count the smaller batches"),
    KnownDifference("schedule.wd_incr_steps", has("--rampup-batch-size"), RAMP, "steps count the smaller batches"),
)


@dataclass
class Comparison:
    """Counts over sets of flags, and what is unexpected."""

    megatron_refuses: int = 0
    we_refuse: int = 0
    compared: int = 0
    equal: int = 0
    known: Counter[KnownDifference] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)


def compare(some: Sequence[Case]) -> Comparison:
    """Compare the settings of some sets of flags."""
    found, table = Comparison(), tuple(rows())
    for case in some:
        if case.settings is None:
            found.megatron_refuses += 1
            continue
        try:
            plan = case.plan()
        except ConfigError:
            found.we_refuse += 1
            continue
        for row in table:
            if not row.applies(plan):
                continue
            theirs, ours, name = row.value(case.settings), row.ours(plan), row.names[0]
            reasons = [one for one in DIFFERENCES if one.name == name and one.when(case.settings, case)]
            found.compared += 1
            if theirs == ours:
                found.equal += 1
            elif reasons:
                found.known[reasons[0]] += 1
            else:
                found.unexpected.append(f"{name}: {theirs} in Megatron, {ours} here: {case.flags}")
    return found


def table_of(found: Comparison) -> str:
    """Return the table of docs/migrate.md."""
    accepted = len(cases()) - found.megatron_refuses
    both, share = accepted - found.we_refuse, 100 * found.equal / found.compared
    counts: Counter[tuple[str, str]] = Counter()
    for known, times in found.known.items():
        counts[known.megatron, known.here] += times
    text = f"Of {len(cases()):,} sets of flags Megatron accepts {accepted}, and megapipe {both} of these. "
    text += f"Of {found.compared:,} values compared, {share:.2f} % are equal. The most frequent of {len(counts)} "
    text += "differences:\n\n"
    text += "| values | in Megatron-Core 0.19.2 | here |\n|---|---|---|\n"
    return text + "".join(f"| {times} | {theirs} | {ours} |\n" for (theirs, ours), times in counts.most_common(5))


if __name__ == "__main__":
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(head + BEGIN + table_of(compare(cases())) + END + rest.partition(END)[2], encoding="utf-8")

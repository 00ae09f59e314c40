"""Settings that Megatron-Core derives from flags, beside those that megapipe derives from the same flags.

fixtures/megatron_settings/settings.jsonl.xz has the settings of Megatron 0.19.2 for 1,000 random sets of flags, written
by make_with_megatron.py beside it. megatron_settings.tsv says where each of them is in a plan; `NOT_COMPARED` names
those that have no counterpart, with the reason, and megatron_differences.tsv those that differ on purpose.
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
from tests import tables

FOLDER = Path(__file__).parent
FIXTURE = FOLDER.parent / "fixtures" / "megatron_settings" / "settings.jsonl.xz"
PAGE = FOLDER.parents[1] / "docs" / "migrate.md"
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
    """A row of megatron_settings.tsv: one setting, or some that mean one thing together.

    ours, theirs: the value in the same terms. applies: whether it has an effect.
    """

    names: tuple[str, ...]
    ours: Callable[[RunPlan], Any]
    theirs: Callable[[Settings], Any]
    applies: Callable[[RunPlan], bool]


def rows() -> Iterator[Row]:
    """Yield the rows of megatron_settings.tsv."""
    for settings, ours, theirs, condition in tables.rows(FOLDER / "megatron_settings.tsv"):
        names = tuple(settings.split())
        applies = always if condition == "-" else function_of(condition)
        yield Row(names, function_of(ours), reader_of(names, theirs), applies)


def function_of(words: str) -> Callable[[RunPlan], Any]:
    """Return a function of this file, the function that reads owner.field of a plan, or the negation of one."""
    if words.startswith("not "):
        positive = function_of(words.removeprefix("not "))
        return lambda plan: not positive(plan)
    owner, _, field_name = words.partition(".")
    if not field_name:
        found: Callable[[RunPlan], Any] = globals()[owner]
        return found
    owners = {"topology": lambda plan: plan.topology, "lr": our_rates, "wd": our_decay}
    of_plan = owners.get(owner, lambda plan: getattr(plan.config, owner))
    return lambda plan: getattr(of_plan(plan), field_name)


def reader_of(names: Sequence[str], reader: str) -> Callable[[Settings], Any]:
    """Return the function that gives Megatron's value of a row."""
    if reader in globals():
        found: Callable[[Settings], Any] = globals()[reader]
        return found
    read = READERS[reader]
    return lambda settings: read(settings[names[0]], *(settings.get(name) for name in names[1:]))


# how the values of a row's settings are read
READERS: dict[str, Callable[..., Any]] = {
    "-": lambda value, *others: value,
    "dtype": lambda value: DTYPES[value],
    "last": lambda value, own: value if own is None else own,  # of latent attention, which has its own
    "any_of": lambda *values: any(values),
    "or_0": lambda value: value or 0,
    "or_1": lambda value: value or 1,
    "or_rate": lambda value, rate: value or rate,
    "as_tuple": lambda value: (value,) if isinstance(value, str) else tuple(value) if value else None,
    "marked": lambda marks: [layer for layer, mark in enumerate(marks or ()) if mark],
}


def always(plan: RunPlan) -> bool:
    return True


def is_bf16(plan: RunPlan) -> bool:
    return plan.config.precision.dtype == "bf16"


def is_fp16(plan: RunPlan) -> bool:
    return plan.config.precision.dtype == "fp16"


def is_fp8(plan: RunPlan) -> bool:
    return plan.config.precision.fp8_format is not None


def has_experts(plan: RunPlan) -> bool:
    return plan.config.model.num_experts is not None


def is_latent(plan: RunPlan) -> bool:
    return plan.config.model.multi_latent_attention


def is_rotary(plan: RunPlan) -> bool:
    return plan.config.model.position_embedding_type == "rope"


def has_cp(plan: RunPlan) -> bool:
    return plan.topology.cp > 1


def predicts(plan: RunPlan) -> bool:
    return plan.config.model.mtp_num_layers is not None


def offloads(plan: RunPlan) -> bool:
    return plan.config.offload.cpu_offloading_num_layers > 0


def is_muon_over_tp(plan: RunPlan) -> bool:
    return plan.config.optimizer.optimizer == "muon" and plan.topology.tp > 1


def is_interleaved(plan: RunPlan) -> bool:
    return plan.config.parallel.num_virtual_stages_per_pipeline_rank > 1


def their_activation(settings: Settings) -> str:
    names = ("activation_func", "gated_linear_unit", "bias_activation_fusion")
    function, gated, fused = (settings[f"model.{name}"] for name in names)
    return ACTIVATIONS[function, gated, fused]


def their_clamp(settings: Settings) -> Any:
    """Return the clamp; the fused kernel of SwiGLU clamps nothing."""
    is_fused_swiglu = settings["model.activation_func"] == "silu" and settings["model.bias_activation_fusion"]
    return None if is_fused_swiglu else settings["model.activation_func_clamp_value"]


def our_qkv_bias(plan: RunPlan) -> bool:
    return plan.config.model.add_qkv_bias or plan.config.model.add_bias_linear


def our_layers_without_rope(plan: RunPlan) -> list[int]:
    layers = enumerate(layer_configs(plan.config.model))
    return [number for number, layer in layers if layer.position_embedding_type != "rope"]


def our_windows(plan: RunPlan) -> list[int | None]:
    return [layer.window_size for layer in layer_configs(plan.config.model)]


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


def our_microbatches(plan: RunPlan) -> int:
    return plan.batch.full // (plan.config.training.micro_batch_size * plan.topology.dp)


def our_main_params(plan: RunPlan) -> str:
    return "fp32"


def our_rates(plan: RunPlan) -> Any:
    return lr_schedule(plan.config.optimizer, plan.config.training)


def our_decay(plan: RunPlan) -> Any:
    return weight_decay_schedule(plan.config.optimizer, plan.config.training)


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
    """A setting that differs on purpose where the condition on flags holds."""

    name: str  # the first name of its row
    condition: str
    megatron: str
    here: str

    def holds(self, case: Case) -> bool:
        """Return True if each flag after + is given, and none after - is."""
        words, given = self.condition.split(), case.flags.split()
        return all(
            any(flag in given for flag in flags.split("|")) == (sign == "+")
            for sign, flags in zip(words[::2], words[1::2], strict=True)
        )


DIFFERENCES = tuple(KnownDifference(*row) for row in tables.rows(FOLDER / "megatron_differences.tsv"))


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
            theirs, ours, name = row.theirs(case.settings), row.ours(plan), row.names[0]
            reasons = [one for one in DIFFERENCES if one.name == name and one.holds(case)]
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

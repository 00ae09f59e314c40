"""Planned bytes that a stage keeps for its backward equal those that autograd saves, for every recompute option."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, product
from types import MethodType
from typing import Any

import pytest
import torch

from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.layers.model import ModelSpec, model_parameters, model_spec
from megapipe.layers.table import Documents, RankShape
from megapipe.model.context import LayerContext
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.plan.activations import deferred_bytes, replay_bytes, shared_bytes, stage_bytes
from megapipe.schedule.partition import StageLayers
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.random import DropoutKey
from tests.model.grids import BATCH, GPT2, LLAMA, NOPE, SEQ, make_microbatch, make_stage, model_config
from tests.model.saved_bytes import SavedBytes

LAYERS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2_dropout": GPT2 | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": LLAMA,
    "llama_qk_norm_layernorm": LLAMA | {"qk_layernorm": True, "normalization": "LayerNorm"},
    "llama_soft_caps": LLAMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "squared_relu_half_rotary": LLAMA | {"activation": "squared_relu", "rotary_percent": 0.6},
    "sinks_clamped_offset_quick_geglu": LLAMA
    | {
        "softmax_type": "learnable",
        "attn_logit_softcapping": 2.0,
        "activation": "quick_geglu",
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
    "geglu_qkv_bias": LLAMA | {"activation": "geglu_tanh", "add_qkv_bias": True},
}
LATENT = LLAMA | {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "q_lora_rank": 9,
    "kv_lora_rank": 7,
    "qk_layernorm": True,
}
SHAPES |= {
    "latent": LATENT,
    "latent_of_keys_alone_soft_cap": LATENT | {"q_lora_rank": None, "attn_logit_softcapping": 2.0},
    "latent_without_norms_dropout": LATENT
    | {"qk_layernorm": False, "attention_dropout": 0.1, "norm_position": "around"},
}
PREDICTIONS = LLAMA | {"mtp_num_layers": 2}
SHAPES |= {
    "predictions_layernorm_dropout_tied": PREDICTIONS
    | {
        "normalization": "LayerNorm",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "untie_embeddings_and_output_weights": False,
        "final_logit_softcapping": 3.0,
        "embedding_scale": 5.0,
    },
    "latent_queries_that_grow": LATENT
    | {"rope_scaling_type": "yarn", "rope_original_max_position_embeddings": 4, "yarn_query_scale": 0.5},
}
# layers that differ, and other places of norms than before attention and MLP
UNLIKE: dict[str, dict[str, Any]] = {
    "windows_and_rotary_in_some": LLAMA
    | {"window_size": 4, "window_attn_skip_freq": "3", "no_rope_freq": "[1,0,0]", "embedding_scale": 5.0},
    "norms_after_projection_qk_norm": LLAMA
    | {"norm_position": "after", "qk_layernorm": True, "qk_layernorm_scope": "projection"},
    "queries_that_grow_norms_without_weights": LLAMA | NOPE | {"qk_l2_norm": True, "attention_output_gate": True},
    "gated_qk_norm": LLAMA | {"attention_output_gate": True, "qk_layernorm": True},
    "scaled_branches_norms_after": LLAMA | {"residual_scale": 0.3, "norm_position": "after"},
    "norms_around_layernorm_dropout": GPT2
    | {"norm_position": "around", "hidden_dropout": 0.1, "attention_dropout": 0.1, "qk_layernorm": True},
    "missing_parts": LLAMA
    | {"layer_pattern": ("1 attention=none", "1 mlp=none num_query_groups=4", "1 ffn_hidden_size=36")},
    "every_layer_another": LLAMA
    | {
        "qk_layernorm": True,
        "window_size": 4,
        "layer_pattern": (
            "1 norm_position=after qk_layernorm_scope=projection rotary_base=500 activation=relu",
            "1 norm_position=around attn_logit_softcapping=2 window_size=6 ffn_hidden_size=36 num_query_groups=1",
            "1 position_embedding_type=none qk_layernorm=false window_size=none activation=squared_relu",
        ),
    },
}
# one of 4 tokens, one over the whole sequence and none
WINDOWS = ("1 window_size=4 rotary_base=500", f"1 window_size={SEQ + 8} position_embedding_type=none", "1")
ALL_SHAPES = SHAPES | UNLIKE
DENSE_MODULES = ("core_attn", "layernorm", "mlp", "activation")
SELECTIONS = [modules for count in range(1, 5) for modules in combinations(DENSE_MODULES, count)]
RECOMPUTES = {
    "none": RecomputeConfig(),
    **{"-".join(modules): RecomputeConfig("selective", recompute_modules=modules) for modules in SELECTIONS},
    **{f"{method}{n}": RecomputeConfig("full", method, n) for method in ("uniform", "block") for n in (1, 2, 3, 4)},
    **{
        f"{method}2_kept": RecomputeConfig("full", method, 2, recompute_keep_attention=True)
        for method in ("uniform", "block")
    },
}
PARTS = {
    "one_layer": StageLayers(0, 1, True, True),
    "whole": StageLayers(0, LAYERS, True, True),
    "first": StageLayers(0, 2, True, False),
    "inner": StageLayers(1, LAYERS, False, False),
    "last": StageLayers(2, LAYERS, False, True),
    "embedding_alone": StageLayers(0, 0, True, False),
    "head_alone": StageLayers(LAYERS, LAYERS, False, True),
}
FEW = ("none", "core_attn-layernorm-mlp-activation", "uniform2", "block1")  # on every part
KEEPS_ATTENTION = [name for name, recompute in RECOMPUTES.items() if recompute.recompute_keep_attention]
CASES = [
    (part, name)
    for part in PARTS
    for name, recompute in RECOMPUTES.items()
    if name in FEW or part == ("whole" if recompute.recompute_granularity == "full" else "one_layer")
]
CASES_OF_UNLIKE = [(part, name) for part in PARTS for name in RECOMPUTES if name in FEW or part == "whole"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Count:
    """Bytes that hooks saw in the forward, and new bytes in the backward's replays.

    storages: one line per storage, for messages.
    """

    forward: int
    replayed: int
    storages: tuple[str, ...]


@cache
def weights_of(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {spec.name: torch.randn(spec.shape, dtype=dtype) * 0.1 for spec in model_parameters(config, False)}


def counted(
    config: ModelConfig,
    part: StageLayers,
    recompute: RecomputeConfig | tuple[RecomputeConfig, ...],
    dtype: torch.dtype,
    microbatch: Microbatch | None = None,
    backward: bool = False,
) -> Count:
    loss = TrainingConfig(label_smoothing=0.1, z_loss=0.1)
    stage = make_stage(
        config,
        weights_of(config, dtype),
        layers=part,
        recompute=recompute,
        loss=loss,
    )
    microbatch = microbatch or dataclasses.replace(
        make_microbatch(config, dropout_key=DropoutKey(1, 2, 3)), loss_mask=None
    )
    inputs: tuple[torch.Tensor, ...] = ()
    if not part.has_embedding:
        inputs = (torch.randn(config.seq_length, BATCH, config.hidden_size, dtype=dtype).requires_grad_(),)
    fields = tensors_of(microbatch)
    shared = masks_of(stage.make_context(microbatch, dtype)) if microbatch.document_ids is None else []
    excluded = [tensor for tensor in (*fields, *shared) if isinstance(tensor, torch.Tensor)]
    with SavedBytes(stage, excluded) as saved:
        output = stage(*inputs, microbatch)
        forward = saved.total
        storages = tuple(saved.storages)
        if backward:
            (objective_of(output) if part.has_head else output.sum()).backward()
    return Count(forward, saved.total - forward, storages)


def objective_of(output: StageLoss) -> torch.Tensor:
    return output.loss_sum + sum(each.loss_sum for each in output.ahead)


def masks_of(contexts: Mapping[int, LayerContext]) -> list[torch.Tensor]:
    """Return the masks that the layers of a stage share."""
    return [context.mask for context in dict.fromkeys(contexts.values()) if context.mask is not None]


def spec_of(config: ModelConfig) -> ModelSpec:
    return model_spec(config, PrecisionConfig())


def shape_of(
    config: ModelConfig,
    dtype: str,
    recompute: RecomputeConfig,
    documents: Documents | None = None,
) -> RankShape:
    return RankShape(BATCH, config.seq_length, dtype, 1, False, recompute, documents or Documents(), is_cuda=False)


def planned(
    config: ModelConfig,
    part: StageLayers,
    recompute: RecomputeConfig,
    dtype: str,
) -> dict[str, int]:
    return stage_bytes(spec_of(config), shape_of(config, dtype, recompute), part)


def cases_of(shape: str, config: ModelConfig) -> list[tuple[str, str]]:
    """Return parts of a model and recompute options, but for those that the configuration rejects."""
    keeps_none = any(layer.attention and layer.attention.is_explicit for layer in spec_of(config).layers)
    cases = CASES_OF_UNLIKE if shape in UNLIKE else CASES
    return [(part, name) for part, name in cases if not (name in KEEPS_ATTENTION and keeps_none)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_a_stage_keeps_the_bytes_in_the_plan_for_every_recompute_option(shape: str, dtype: str) -> None:
    config = model_config(num_layers=LAYERS, **ALL_SHAPES[shape])
    for part, name in cases_of(shape, config):
        count = counted(config, PARTS[part], RECOMPUTES[name], DTYPES[dtype])
        plan = planned(config, PARTS[part], RECOMPUTES[name], dtype)
        assert sum(plan.values()) == count.forward, f"{part}, recompute {name}: {plan}\n" + "\n".join(count.storages)


EXPERTS: dict[str, Any] = LLAMA | {"num_experts": 4, "moe_ffn_hidden_size": 20}
EXPERT_SHAPES: dict[str, dict[str, Any]] = {
    "sinkhorn, two": EXPERTS | {"moe_router_load_balancing_type": ("sinkhorn",), "moe_z_loss_coeff": 0.1},
    "sigmoid, weights as they are": EXPERTS
    | {"moe_router_score_function": "sigmoid", "moe_router_norm_topk_prob": False},
    "weights on inputs, biases": EXPERTS
    | {"moe_apply_probs_on_input": True, "add_bias_linear": True, "moe_shared_expert_intermediate_size": 12},
    "losses of sequences, sigmoid": EXPERTS
    | {"moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.1,)}
    | {"moe_router_score_function": "sigmoid", "moe_z_loss_coeff": 0.1},
    "shared with a gate": EXPERTS | {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    "biases, relu": EXPERTS | {"add_bias_linear": True, "activation": "relu"},
    "padded": EXPERTS | {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
}
SMALL = 200  # bytes: a few numbers for each expert
OF_EXPERTS = [("moe",), ("layernorm", "moe"), ("core_attn", "moe"), ("moe_act",), ("moe_act", "shared_experts")]
OF_EXPERTS += [("layernorm", "shared_experts"), ("layernorm", "moe_act", "shared_experts")]
OF_EXPERTS += [("layernorm",), ("layernorm", "moe_act"), ("core_attn", "layernorm", "moe_act", "activation")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", EXPERT_SHAPES)
def test_experts_keep_the_bytes_in_the_plan_for_every_recompute_option(shape: str, dtype: str) -> None:
    config = model_config(num_layers=2, **EXPERT_SHAPES[shape])
    part = StageLayers(0, 2, True, True)
    selective = [RecomputeConfig("selective", recompute_modules=modules) for modules in OF_EXPERTS]
    full = [RECOMPUTES[name] for name in ("uniform1", "uniform2", "uniform2_kept")]
    for recompute in (RecomputeConfig(), *selective, *full):
        count = counted(config, part, recompute, DTYPES[dtype])
        plan = planned(config, part, recompute, dtype)
        # autograd does not see the counts and losses that a router holds itself
        unseen = sum(plan.values()) - count.forward
        assert 0 <= unseen <= SMALL, f"{recompute}: {plan}\n" + "\n".join(count.storages)


OF_LATENTS = [("mla_up_proj",), ("mla_up_proj", "core_attn"), ("mla_up_proj", "layernorm"), ("mla_up_proj", "mlp")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [shape for shape in ALL_SHAPES if "latent" in shape])
def test_latent_attention_keeps_the_bytes_in_the_plan_when_it_is_projected_up_again(shape: str, dtype: str) -> None:
    config = model_config(num_layers=2, **ALL_SHAPES[shape])
    part = StageLayers(0, 2, True, True)
    is_written_out = any(layer.attention and layer.attention.is_explicit for layer in spec_of(config).layers)
    for modules in OF_LATENTS:
        if is_written_out and "core_attn" not in modules:
            continue  # the configuration rejects it
        recompute = RecomputeConfig("selective", recompute_modules=modules)
        count = counted(config, part, recompute, DTYPES[dtype])
        plan = planned(config, part, recompute, dtype)
        assert sum(plan.values()) == count.forward, f"{modules}: {plan}\n" + "\n".join(count.storages)


@pytest.mark.parametrize("recompute", ["none", "core_attn", "layernorm-mlp", "uniform2", "block1", "uniform2_kept"])
@pytest.mark.parametrize("pattern", [(), WINDOWS], ids=["alike", "windows"])
@pytest.mark.parametrize("option", [None, "qk_layernorm", "attention_output_gate"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_documents_cost_what_the_plan_says(
    groups: int, option: str | None, pattern: tuple[str, ...], recompute: str
) -> None:
    options = (
        LLAMA | {"num_query_groups": groups, "layer_pattern": pattern} | ({} if option is None else {option: True})
    )
    config = model_config(num_layers=LAYERS, **options)
    documents = Documents(position_ids=True, attention_mask=True, loss_mask=True)
    count = counted(
        config, PARTS["whole"], RECOMPUTES[recompute], torch.float64, microbatch=make_microbatch(config, documents=True)
    )
    shape = shape_of(config, "fp64", RECOMPUTES[recompute], documents=documents)
    plan = stage_bytes(spec_of(config), shape, PARTS["whole"])
    unseen = plan["rotary tables"]  # an attribute of autograd's context
    if recompute == "block1" and pattern:  # only the first layer, which is replayed, has a window
        unseen += plan["document masks"] // 2
    if recompute in (
        "core_attn",
        "uniform2",
        "uniform2_kept",
    ):  # all layers replay their attention from a closure that holds the mask
        unseen += plan["document masks"]
    assert sum(plan.values()) - unseen == count.forward, f"{plan}\n" + "\n".join(count.storages)


REPLAYS = {"uniform1": 1, "uniform2": 2, "uniform3": 3, "block1": 1, "core_attn": 1, "mlp": 1, "layernorm-mlp": 1}
OF_REPLAYS = [
    *product(["gpt2", "gpt2_dropout", "llama", "llama_qk_norm_layernorm", "llama_soft_caps"], REPLAYS.items()),
    *product(["gpt2", "llama", "llama_qk_norm_layernorm"], [("uniform2_kept", 2)]),  # others have no fused attention
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "case"), OF_REPLAYS, ids=lambda value: str(value))
def test_a_recompute_makes_the_bytes_in_the_plan(shape: str, case: tuple[str, int], dtype: str) -> None:
    """Hooks see what a replay saves; besides, its last result is alive, and what it makes and frees before its end."""
    recompute, num_layers = case
    config = model_config(num_layers=num_layers, **SHAPES[shape])
    part = StageLayers(0, num_layers, True, True)
    count = counted(config, part, RECOMPUTES[recompute], DTYPES[dtype], backward=True)
    planned = replay_bytes(spec_of(config).layers, shape_of(config, dtype, RECOMPUTES[recompute]))
    widest = 2 * BATCH * SEQ * max(config.feed_forward_size(), config.num_attention_heads * SEQ) * 8
    assert count.replayed <= planned <= count.replayed + widest


@pytest.mark.parametrize(
    "recompute", ["none", "core_attn", "layernorm", "activation", "mlp", "core_attn-layernorm-mlp", "uniform2"]
)
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_queued_weight_gradients_keep_the_bytes_in_the_plan(shape: str, recompute: str) -> None:
    config = model_config(num_layers=LAYERS, **ALL_SHAPES[shape])
    if recompute == "uniform2" and ("whole", "uniform2_kept") in cases_of(shape, config):
        recompute = "uniform2_kept"
    for part, dtype in ((PARTS["whole"], "bf16"), (PARTS["inner"], "fp32")):
        queue = WeightQueue()
        stage = make_stage(
            config, weights_of(config, DTYPES[dtype]), layers=part, recompute=RECOMPUTES[recompute], queue=queue
        )
        microbatch = make_microbatch(config, dropout_key=DropoutKey(1, 2, 3))
        hidden = torch.randn(config.seq_length, BATCH, config.hidden_size, dtype=DTYPES[dtype], requires_grad=True)
        output = stage(*([] if part.has_embedding else [hidden]), microbatch)
        queue.defer(0)
        objective = objective_of(output) if part.has_head else output
        torch.autograd.backward(objective, None if part.has_head else torch.randn_like(objective))
        queue.immediate()
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for waiting in queue.waiting[0]
            for t in tensors_of(waiting)
        }
        known = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), *tensors_of(microbatch))}
        counted_bytes = sum(size for address, size in held.items() if address not in known)
        shape = shape_of(config, dtype, RECOMPUTES[recompute])
        assert counted_bytes == deferred_bytes(spec_of(config), shape, part)


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield every tensor reachable from an object of megapipe, including functions and replays."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (torch.nn.Module, str, int, float, type(None))):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each, seen)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()), seen)
    elif isinstance(value, MethodType):
        yield from tensors_of(value.__self__, seen)
    elif type(value).__module__.startswith("megapipe"):
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())] + list(
            getattr(value, "__dict__", ())
        )
        for name in names:
            yield from tensors_of(getattr(value, name, None), seen)


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_tables_shared_by_microbatches_have_the_bytes_in_the_plan(shape: str) -> None:
    config = model_config(num_layers=LAYERS, **ALL_SHAPES[shape])
    for part in PARTS.values():
        stage = make_stage(config, weights_of(config, torch.bfloat16), layers=part)
        microbatch = make_microbatch(config, dropout_key=DropoutKey(1, 2, 3))
        contexts = dict.fromkeys(stage.make_context(microbatch, torch.bfloat16).values())
        tensors = [tensor for context in contexts for tensor in (*context.masks, *(context.rotary or ()))]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        planned = shared_bytes(spec_of(config), (shape_of(config, "bf16", RecomputeConfig()),), part)
        assert sum(held.values()) == planned.total()

"""Planned bytes that a stage keeps for its backward equal those that autograd saves, for every recompute option."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from itertools import combinations, product

import pytest
import torch

from megapipe.config.layers import is_explicit
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.layers.model import ModelSpec, model_spec
from megapipe.layers.table import Documents, RankShape
from megapipe.model.context import LayerContext
from megapipe.model.microbatch import Microbatch, StageLoss
from megapipe.plan.activations import replay_bytes, shared_bytes, stage_bytes
from megapipe.schedule.partition import StageLayers
from megapipe.tensor_parallel.random import DropoutKey
from megapipe.trace.parameters import model_parameters
from tests.model.grids import BATCH, LLAMA, SEQ, SETS, make_microbatch, make_stage, model_config, options_of
from tests.model.saved_bytes import SavedBytes

LAYERS = 3
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
# layers that differ
MISSING = {"layer_pattern": ("1 attention=none", "1 mlp=none num_query_groups=4", "1 ffn_hidden_size=36")}
ANOTHER = {
    "layer_pattern": (
        "1 norm_position=after qk_layernorm_scope=projection rotary_base=500 activation=relu",
        "1 norm_position=around attn_logit_softcapping=2 window_size=6 ffn_hidden_size=36 num_query_groups=1",
        "1 position_embedding_type=none qk_layernorm=false window_size=none activation=squared_relu",
    ),
}
NAMED = SETS | {"LATENT": LATENT, "MISSING": MISSING, "ANOTHER": ANOTHER}
SHAPES, UNLIKE = options_of("bytes", NAMED), options_of("unlike", NAMED)
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
    backward: bool = False,
    microbatch: Microbatch | None = None,
) -> Count:
    loss = TrainingConfig(label_smoothing=0.1, z_loss=0.1)
    stage = make_stage(
        config,
        weights_of(config, dtype),
        layers=part,
        recompute=recompute,
        loss=loss,
    )
    if microbatch is None:
        microbatch = dataclasses.replace(make_microbatch(config, dropout_key=DropoutKey(1, 2, 3)), loss_mask=None)
    inputs: tuple[torch.Tensor, ...] = ()
    if not part.has_embedding:
        inputs = (torch.randn(config.seq_length, BATCH, config.hidden_size, dtype=dtype).requires_grad_(),)
    fields = [field for each in (microbatch, *microbatch.ahead) for field in vars(each).values()]
    if microbatch.borders is not None:
        fields += vars(microbatch.borders).values()
    shared = (*fields, *masks_of(stage.make_context(microbatch, dtype)))
    excluded = [tensor for tensor in shared if isinstance(tensor, torch.Tensor)]
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
    config: ModelConfig, dtype: str, recompute: RecomputeConfig, documents: Documents | None = None
) -> RankShape:
    return RankShape(
        BATCH, config.seq_length, dtype, recompute=recompute, documents=documents or Documents(), is_cuda=False
    )


def cases_of(shape: str, config: ModelConfig) -> list[tuple[str, str]]:
    """Return parts of a model and recompute options, but for those that the configuration rejects."""
    keeps_none = any(layer.config.has_attention and is_explicit(layer.config) for layer in spec_of(config).layers)
    cases = CASES_OF_UNLIKE if shape in UNLIKE else CASES
    return [(part, name) for part, name in cases if not (name in KEEPS_ATTENTION and keeps_none)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_a_stage_keeps_the_bytes_in_the_plan_for_every_recompute_option(shape: str, dtype: str) -> None:
    config = model_config(num_layers=LAYERS, **ALL_SHAPES[shape])
    for part, name in cases_of(shape, config):
        count = counted(config, PARTS[part], RECOMPUTES[name], DTYPES[dtype])
        plan = stage_bytes(spec_of(config), shape_of(config, dtype, RECOMPUTES[name]), PARTS[part])
        assert sum(plan.values()) == count.forward, f"{part}, recompute {name}: {plan}\n" + "\n".join(count.storages)


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

"""Each storage that the planner offloads is one that autograd keeps."""

from __future__ import annotations

import pytest
import torch

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.table import Documents
from megapipe.model.recompute import layer_groups
from megapipe.plan.activations import group_keeps, group_sizes
from megapipe.plan.activations import layer_groups as planned_groups
from megapipe.tensor_parallel.random import DropoutKey
from tests.model.grids import BATCH, LLAMA, make_microbatch, make_stage, model_config
from tests.model.saved_bytes import SavedBytes
from tests.model.test_planned_bytes import (
    ALL_SHAPES,
    DTYPES,
    EXPERT_SHAPES,
    OF_EXPERTS,
    RECOMPUTES,
    masks_of,
    shape_of,
    spec_of,
    weights_of,
)

SHAPES = [name for name, sizes in ALL_SHAPES.items() if not sizes.get("multi_latent_attention")]  # which is refused
CASES = [(shape, recompute) for shape in SHAPES for recompute in ("none", "core_attn-layernorm-mlp", "activation")]
CASES += [
    ("llama", "uniform2"),
    ("llama", "uniform2_kept"),
    ("gpt2", "block2_kept"),
    ("documents", "none"),
    ("documents_qk_norm", "none"),
]
DOCUMENTS = LLAMA | {"position_embedding_type": "rope"}
OF = ALL_SHAPES | {"documents": DOCUMENTS, "documents_qk_norm": DOCUMENTS | {"qk_layernorm": True}}


EXPERTS = [(shape, modules) for shape in EXPERT_SHAPES for modules in ((), *OF_EXPERTS)]
OF |= EXPERT_SHAPES


@pytest.mark.parametrize(("shape", "modules"), EXPERTS)
def test_groups_with_experts_keep_the_storages_in_the_plan(shape: str, modules: tuple[str, ...]) -> None:
    recompute = RecomputeConfig("selective" if modules else None, recompute_modules=modules)
    compare_storages(shape, recompute, "bf16")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "name"), CASES)
def test_groups_keep_the_storages_in_the_plan(shape: str, name: str, dtype: str) -> None:
    compare_storages(shape, RECOMPUTES[name], dtype)


def compare_storages(shape: str, recompute: RecomputeConfig, dtype: str) -> None:
    config = model_config(num_layers=3, **OF[shape])
    stage = make_stage(config, weights_of(config, DTYPES[dtype]), recompute=recompute)
    documents = Documents(attention_mask=True, position_ids=True) if shape.startswith("documents") else Documents()
    microbatch = make_microbatch(config, documents=documents.attention_mask, dropout_key=DropoutKey(1, 2, 3))
    contexts = stage.make_context(microbatch, DTYPES[dtype])
    hidden = torch.randn(config.seq_length, BATCH, config.hidden_size, dtype=DTYPES[dtype], requires_grad=True)
    with SavedBytes(stage, masks_of(contexts)) as saved:
        stage.run_layers(hidden, contexts)
    seen = sorted((size, saved._shapes[address][1].itemsize) for address, size in saved._sizes.items())
    of_rank = shape_of(config, dtype, recompute, documents=documents)
    groups = planned_groups(spec_of(config).layers, of_rank)
    planned = [tensor for group in groups for tensor in group_keeps(group, of_rank)]
    assert sorted((tensor.num_bytes, tensor.element_bytes) for tensor in planned) == seen


@pytest.mark.parametrize(
    "recompute", [RecomputeConfig(), *(RecomputeConfig("full", m, n) for m in ("uniform", "block") for n in (1, 2, 5))]
)
def test_the_planner_groups_layers_as_the_stage_does(recompute: RecomputeConfig) -> None:
    assert group_sizes(recompute, 5) == tuple(len(layers) for layers, _ in layer_groups(recompute, range(3, 8)))

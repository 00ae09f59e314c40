"""Packed documents by their borders: the same loss and gradients as under a mask, and the planned bytes.

torch's operator runs on a stand-in for its CUDA kernel (`varlen_on_cpu`).
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.assembly.microbatches import to_microbatch
from megapipe.config.config import Config, ResolvedModelConfig
from megapipe.config.files import DataConfig
from megapipe.config.gpu import GpuConfig, KernelsConfig
from megapipe.config.layers import why_masked
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import ParallelConfig, RecomputeConfig
from megapipe.data.batch import Batch, DocumentRules
from megapipe.extras.report.kernels import describe_kernels
from megapipe.gpu.kernels import TORCH, why_not_packed
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.layers.model import rank_shape
from megapipe.layers.table import Documents
from megapipe.model.microbatch import Microbatch
from megapipe.plan.activations import stage_bytes
from tests.model import varlen_on_cpu
from tests.model.grids import LLAMA, assert_equal, make_microbatch, make_stage, model_config, reference
from tests.model.test_planned_bytes import LAYERS, PARTS, RECOMPUTES, counted, shape_of, spec_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "heads": LLAMA | {"num_query_groups": 4},
    "one_group": LLAMA | {"num_query_groups": 1},
    "qk_norm": LLAMA | {"qk_layernorm": True},
    "windows": LLAMA | {"layer_pattern": ("1 window_size=3", "1 window_size=1", "...")},
}
RECOMPUTED = {
    "kept": RecomputeConfig(),
    "core_attn": RecomputeConfig("selective", recompute_modules=("core_attn",)),
    "full": RecomputeConfig("full", "uniform", 1),
    "full_attention_kept": RecomputeConfig("full", "uniform", 2, recompute_keep_attention=True),
}


def packed(microbatch: Microbatch, sequences: int) -> tuple[Microbatch, Microbatch]:
    """Return the first sequences of a microbatch with ids, and with borders."""
    values = {field.name: getattr(microbatch, field.name) for field in dataclasses.fields(microbatch)}
    masked = Microbatch(**{k: v[:sequences] if isinstance(v, Tensor) else v for k, v in values.items()})
    assert masked.document_ids is not None
    borders = DocumentBorders.of(masked.document_ids.numpy(), torch.from_numpy)
    return masked, dataclasses.replace(masked, document_ids=None, borders=borders)


def config_of(name: str) -> ResolvedModelConfig:
    return model_config(kv_channels=8, num_layers=LAYERS, **OPTIONS[name])


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("name", OPTIONS)
def test_borders_give_the_loss_and_gradients_of_a_mask(name: str, recompute: str, sequences: int) -> None:
    config, results = config_of(name), []
    weights = dict(reference(config).named_parameters())
    varlen_on_cpu.RUNS.clear()
    for microbatch in packed(make_microbatch(config, documents=True), sequences):
        stage = make_stage(config, weights, recompute=RECOMPUTED[recompute])
        loss = stage(microbatch).loss_sum
        loss.backward()
        results.append((loss.detach(), {name: parameter.grad for name, parameter in stage.named_parameters()}))
    (expected, gradients), (actual, others) = results
    assert_equal(actual, expected, "loss")
    for key, gradient in gradients.items():
        assert_equal(others[key], gradient, key)
    shape, longest = varlen_on_cpu.RUNS[0]
    assert shape == (12 * sequences, 4, 8) and longest == 7
    assert len(varlen_on_cpu.RUNS) == LAYERS * (2 if recompute in ("core_attn", "full") else 1)


@pytest.mark.parametrize("recompute", ["none", "core_attn", "layernorm-mlp", "uniform2", "uniform2_kept"])
@pytest.mark.parametrize("name", OPTIONS)
def test_borders_cost_what_the_plan_says(name: str, recompute: str) -> None:
    config = config_of(name)
    documents = Documents(position_ids=True, loss_mask=True, borders=True)
    _, microbatch = packed(make_microbatch(config, documents=True), 2)
    count = counted(config, PARTS["whole"], RECOMPUTES[recompute], torch.float32, microbatch=microbatch)
    shape = shape_of(config, "fp32", RECOMPUTES[recompute], documents=documents)
    plan = stage_bytes(spec_of(config), shape, PARTS["whole"])
    assert "document masks" not in plan
    expected = sum(plan.values()) - plan["rotary tables"]  # an attribute of autograd's context
    assert microbatch.borders is not None  # its tensors are planned, and not counted here, with the microbatch
    seeds = 16 * LAYERS  # bytes: of dropout, which CUDA's kernel returns
    assert expected - seeds <= count.forward <= expected, f"{plan}\n" + "\n".join(count.storages)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=3))
def test_documents_lie_between_borders(lengths: list[list[int]]) -> None:
    """Ids of several sequences, the last documents cut to one length."""
    seq = min(sum(row) for row in lengths)
    rows = [[i for i, length in enumerate(row) for _ in range(length)][:seq] for row in lengths]
    borders = DocumentBorders.of(np.array(rows, dtype=np.int64), torch.from_numpy)
    assert borders.starts.dtype == torch.int32
    documents = [(number, i) for number, row in enumerate(rows) for i in row]
    spans = list(pairwise(borders.starts.tolist()))
    assert [set(documents[a:b]) for a, b in spans] == [{each} for each in dict.fromkeys(documents)]
    assert borders.longest == max(b - a for a, b in spans)


def test_a_batch_moves_borders_or_ids() -> None:
    rules = DocumentRules(0, reset_attention_mask=True)
    batch = Batch.of(np.array([[5, 0, 6, 7, 8], [1, 2, 3, 0, 4]]), (0, 1), rules)
    with_ids, with_borders = (to_microbatch(batch, CPU, None, packs) for packs in (False, True))
    assert with_ids.borders is None and with_ids.document_ids is not None
    assert with_borders.document_ids is None and with_borders.borders is not None
    assert with_borders.borders.starts.tolist() == [0, 2, 4, 8] and with_borders.borders.longest == 4


def config_with(**changes: Any) -> Config:
    """Return a configuration with documents; changes: by the names of their fields."""
    model = {"attention_dropout": 0.0, "hidden_size": 64, "num_attention_heads": 8}
    model |= {key: changes.pop(key) for key in list(changes) if key in ModelConfig.__dataclass_fields__}
    return Config(
        model=ModelConfig(**model),
        parallel=ParallelConfig(context_parallel_size=changes.pop("cp", 1)),
        precision=PrecisionConfig(dtype=changes.pop("dtype", "bf16")),
        data=DataConfig(reset_attention_mask=changes.pop("documents", True)),
        kernels=KernelsConfig(attention_impl=changes.pop("attention_impl", "sdpa")),
        gpu=GpuConfig(**changes),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"window_size": 4}, None),
        ({"documents": False, "dtype": "fp32"}, None),
        ({"dtype": "fp16"}, None),
        ({"dtype": "fp32"}, "take bf16 and fp16, not fp32"),
        ({"attn_logit_softcapping": 30.0}, "attention is not fused"),
        ({"attention_dropout": 0.1}, "attention is not fused"),
        ({"layer_pattern": ("1 attn_logit_softcapping=2", "...")}, "attention is not fused"),
        ({"kv_channels": 12}, "a multiple of 8 channels up to 256, not 12"),
        ({"kv_channels": 264}, "up to 256, not 264"),
        ({"cuda_graph_impl": "local"}, "fixed sizes"),
        ({"cp": 2}, "context parallelism"),
        ({"attention_impl": "flash", "attn_logit_softcapping": 30.0}, None),
    ],
    ids=str,
)
def test_what_the_kernel_lacks_keeps_the_mask(changes: dict[str, Any], reason: str | None) -> None:
    has_documents = changes.get("documents", True)
    config = config_with(num_layers=2, seq_length=16, **changes)
    found = why_masked(config, is_cuda=True)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    shape = rank_shape(config, 1, False, 1).documents
    assert shape.attention_mask == (reason is not None) and shape.borders == (has_documents and reason is None)
    if has_documents and "attention_impl" not in changes:
        assert why_masked(config, is_cuda=False) == "only GPUs have variable-length kernels"


def test_the_start_names_the_kernel_of_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config, capability = config_with(), (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def line() -> str:
        (found,) = (line for line in describe_kernels(TORCH, config, CUDA) if line.startswith("attention"))
        return found

    assert line().startswith("attention  torch's variable-length flash kernel, by documents")
    capability = (7, 0)
    assert "needs compute capability 8.0, and this GPU has 7.0" in (why_not_packed(config, CUDA) or "")
    assert "scaled_dot_product_attention under a mask" in line()
    config = config_with(dtype="fp32")
    assert "bf16 and fp16, not fp32" in line()

"""Adapters of other libraries, run on stubs with the same signatures, give the same numbers as torch's kernels."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.config.gpu import KernelsConfig
from megapipe.config.load import load_config
from megapipe.config.model import PrecisionConfig
from megapipe.errors import ConfigError
from megapipe.extras.report.kernels import describe_kernels
from megapipe.gpu.kernels import Kernels, choose_kernels
from megapipe.gpu.libraries import AttentionShape, FlashAttention, TransformerEngine
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.model.attention import explicit_attention
from megapipe.model.context import whole_mask
from megapipe.optimizer.schedule import Rates
from megapipe.sharding.sequence import SequenceSlice, Visibility
from tests.gpu.stand_ins import NAMES, installed
from tests.harness import RankPool
from tests.model.grids import (
    GPT2,
    LLAMA,
    assert_equal,
    assert_gradients,
    make_microbatch,
    make_stage,
    model_config,
    reference,
    reference_run,
)
from tests.tensor_parallel.ranks import tp_group
from tests.train.grids import runtime_of, step_microbatches, trainer, whole_parameters

Pools = Callable[[int], RankPool]
BASE = (
    "--num-layers 4 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 4 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-2 "
    "--adam-eps 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 --mock-data --init-method-std 0.3"
)


def chosen(**kernels: str) -> Config:
    return Config(kernels=KernelsConfig(**kernels))


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (
            {"transformer_impl": "transformer_engine"},
            "--transformer-impl transformer_engine needs NVIDIA's Transformer Engine",
        ),
        ({"attention_impl": "te"}, "--attention-impl te needs NVIDIA's Transformer Engine"),
        ({"attention_impl": "flash"}, "pip install --no-build-isolation flash-attn"),
        ({"optimizer_impl": "apex"}, "the apex of PyPI is another package"),
        ({"optimizer_impl": "te"}, "or use --optimizer-impl torch"),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else "",
)
def test_a_missing_library_is_reported_with_its_install_command(kernels: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_kernels(chosen(**kernels))
    assert words in str(error.value)
    assert "cannot be imported here (ModuleNotFoundError" in str(error.value)


def test_a_library_is_imported_only_when_chosen() -> None:
    with installed():
        choose_kernels(chosen())
        assert not set(NAMES) & set(sys.modules)
        choose_kernels(chosen(attention_impl="flash"))
        assert set(NAMES) & set(sys.modules) == {"flash_attn"}
    assert not set(NAMES) & set(sys.modules)


def test_the_start_names_the_library_of_each_kernel() -> None:
    config = dataclasses.replace(
        chosen(transformer_impl="transformer_engine", attention_impl="flash", optimizer_impl="te"),
        precision=PrecisionConfig(dtype="bf16", fp8_format="hybrid"),
    )
    with installed():
        said = "\n".join(describe_kernels(choose_kernels(config), config, torch.device("cuda")))
    assert "Transformer Engine 2.stub (--transformer-impl transformer_engine); fp8 hybrid, tensorwise scaling\n" in said
    assert "flash-attn 2.8.stub (--attention-impl flash)" in said
    assert "FusedAdam of Transformer Engine" in said
    own = Config(precision=PrecisionConfig(dtype="bf16", fp8_format="e4m3"))
    said = "\n".join(describe_kernels(choose_kernels(own), own, torch.device("cpu")))
    assert "emulated on this CPU, for tests: operands rounded to fp8, products in fp32" in said
    assert "explicit, not fused, for --attention-dropout" in said


@pytest.mark.parametrize("queries", [1, 3], ids=["heads", "grouped"])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (None, 1.5)], ids=["plain", "window", "cap"])
@pytest.mark.parametrize("library", ["flash", "te"])
def test_attention_of_a_library_equals_explicit_attention(
    library: str, window: int | None, cap: float | None, queries: int
) -> None:
    if library == "te" and cap is not None:
        return  # refused by a rule
    seq, batch, groups, size = 9, 2, 2, 4
    qkv = torch.randn(seq, batch, groups, queries + 2, size, dtype=torch.float64, requires_grad=True)
    shape = AttentionShape(0, queries, size, 0.4, window, cap, False)
    mask = whole_mask(Visibility.of(SequenceSlice((seq,)), window=window), qkv.device, torch.float64)
    with installed():
        opened = FlashAttention() if library == "flash" else TransformerEngine("", "", PrecisionConfig())
        output = opened.attention(shape)(*qkv.split((queries, 1, 1), dim=3), None)
        (gradient,) = torch.autograd.grad(output.square().sum(), qkv)
    expected = explicit_attention(*qkv.split((queries, 1, 1), dim=3), mask, 0.4, cap, None)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), qkv)
    assert output.shape == (seq, batch, groups * queries * size)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (None, 1.5)], ids=["plain", "window", "cap"])
def test_flash_attention_keeps_documents_apart(window: int | None, cap: float | None) -> None:
    seq, batch, groups, queries, size = 9, 2, 2, 3, 4
    qkv = torch.randn(seq, batch, groups, queries + 2, size, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    borders = DocumentBorders.of(ids.numpy(), torch.from_numpy)
    mask = whole_mask(Visibility.of(SequenceSlice((seq,)), True, window=window), qkv.device, torch.float64, ids)
    with installed():
        kernel = FlashAttention().attention(AttentionShape(0, queries, size, 0.4, window, cap, False))
        output = kernel(*qkv.split((queries, 1, 1), dim=3), borders)
    (gradient,) = torch.autograd.grad(output.square().sum(), qkv)
    expected = explicit_attention(*qkv.split((queries, 1, 1), dim=3), mask, 0.4, cap, None)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), qkv)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


ALL_TE = KernelsConfig("transformer_engine", "te", "torch")


def against_the_reference(
    rank: int, world_size: int, options: dict[str, Any], sequence_parallel: bool, kernels: KernelsConfig
) -> int:
    """Compare a stage built from a library's parts on tp ranks with the fp64 reference."""
    config = model_config(**options)
    model = reference(config)
    microbatch = make_microbatch(config)
    expected = reference_run(model, microbatch, world_size, sequence_parallel)
    tp, weights = tp_group(rank, world_size), dict(model.named_parameters())
    with installed():
        opened: Kernels = choose_kernels(Config(kernels=kernels))
        stage = make_stage(config, weights, tp=tp, sequence_parallel=sequence_parallel, kernels=opened)
        loss = stage(microbatch).loss_sum
        loss.backward()
    assert_equal(loss.detach(), expected.loss_sum, "loss")
    return assert_gradients(stage, config, expected, rank, world_size, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
@pytest.mark.parametrize("name", ["gpt2", "llama_qk_norm", "kv_heads_fewer_than_tp", "zero_centred", "unlike"])
def test_a_stage_of_transformer_engine_equals_the_reference(
    rank_pools: Pools, name: str, sequence_parallel: bool
) -> None:
    options = {
        "gpt2": GPT2,
        "llama_qk_norm": LLAMA | {"qk_layernorm": True, "window_size": 5},
        "kv_heads_fewer_than_tp": LLAMA | {"num_query_groups": 1},
        "zero_centred": GPT2 | {"layernorm_zero_centered_gamma": True},
        "unlike": LLAMA
        | {
            "norm_position": "around",
            "qk_layernorm": True,
            "qk_layernorm_scope": "projection",
            "layer_pattern": ("1 window_size=5 norm_position=after", "1"),
        },
    }[name]
    assert min(rank_pools(2).run(against_the_reference, options, sequence_parallel, ALL_TE)) > 10


def trained(rank: int, world_size: int, flags: str) -> tuple[list[float], list[tuple[str, Tensor]]]:
    """Train for three steps; return the losses and the final parameters."""
    with installed():
        runtime = runtime_of(load_config(f"{BASE} {flags}".split()).config, rank, world_size)
        step = trainer(runtime)
        rows = np.random.RandomState(0).randint(0, 32, (4, 9))
        losses = [step.run(step_microbatches(runtime, rows, index), Rates(1e-2, 0.1)).loss for index in range(3)]
        return losses, [(name, tensor.clone()) for name, tensor in whole_parameters(runtime)]


GRIDS = {
    "one": (1, ""),
    "tp2_sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "zb_h1": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "zb_v_tp2_sp": (
        4,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "zero1_recompute": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --recompute-activations --recompute-modules core_attn mlp",
    ),
    "full": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
    # what the library has no module for is megapipe's own
    "experts_ep2_tp2_sp": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-shared-expert-intermediate-size 16",
    ),
    "latent_attention_zb_h1": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --position-embedding-type rope "
        "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 8",
    ),
    "mtp_tp2_sp": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --mtp-num-layers 1 --position-embedding-type rope",
    ),
}
TE = "--transformer-impl transformer_engine --optimizer-impl te"


@pytest.mark.parametrize(
    ("library", "grid"),
    [
        *((TE, grid) for grid in GRIDS),
        ("--optimizer-impl apex", "one"),
        ("--optimizer-impl apex --normalization RMSNorm", "zb_v_tp2_sp"),
    ],
    ids=lambda value: value.replace("--", "").replace(" ", "_"),
)
def test_training_with_a_library_equals_training_with_torch(rank_pools: Pools, library: str, grid: str) -> None:
    """Train in fp32 with main gradients in our buffers, masters and moments in our shards, and the same schedules."""
    world_size, flags = GRIDS[grid]
    norm = "--normalization RMSNorm" if "RMSNorm" in library else ""
    for (losses, parameters), (expected, wanted) in zip(
        rank_pools(world_size).run(trained, f"{flags} {library}"),
        rank_pools(world_size).run(trained, f"{flags} {norm}"),
        strict=True,
    ):
        assert losses == pytest.approx(expected, rel=2e-6)
        assert losses[2] < losses[0]
        for (name, tensor), (_, other) in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(
                tensor, other, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def regions_of(rank: int, world_size: int, flags: str) -> list[tuple[bool, str, bool]]:
    """Return (enabled, recipe, spans tp) of the outermost fp8 regions of one step."""
    with installed():
        config = load_config(f"{BASE} {flags}".split()).config
        runtime = runtime_of(config, rank, world_size)
        rows = np.random.RandomState(0).randint(0, 32, (2 * config.training.micro_batch_size, 9))
        loss = trainer(runtime).run(step_microbatches(runtime, rows, 0), Rates(1e-2, 0.1)).loss
        assert np.isfinite(loss)
        import transformer_engine.pytorch as te

        return [
            (enabled, type(recipe).__name__, group is runtime.groups.tp.handle) for enabled, recipe, group in te.ENTERED
        ]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_fp8_of_transformer_engine_has_one_region_a_forward_and_shares_maxima_over_tp(
    rank_pools: Pools, recipe: str
) -> None:
    flags = (
        f"{TE} --fp8-format hybrid --fp8-recipe {recipe} --tensor-model-parallel-size 2 --hidden-size 64 "
        "--ffn-hidden-size 64"
    )
    names = {"delayed": "DelayedScaling", "tensorwise": "Float8CurrentScaling"}
    names |= {"blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
    for found in rank_pools(2).run(regions_of, f"{flags} --micro-batch-size 4 --global-batch-size 8"):
        assert found == [(True, names[recipe], True)] * 2


@pytest.mark.parametrize("grid", ["dp2", "pp2"])
def test_fp8_of_transformer_engine_without_tp_reduces_no_maxima(rank_pools: Pools, grid: str) -> None:
    """With delayed scaling the library would all-reduce over the world, in which a stage waits for another's output."""
    flags = "--pipeline-model-parallel-size 2" if grid == "pp2" else ""
    fp8 = f"{TE} --fp8-format hybrid --fp8-recipe delayed --hidden-size 64 --ffn-hidden-size 64 --micro-batch-size 2"
    for found in rank_pools(2).run(regions_of, f"{fp8} {flags}"):
        assert {(enabled, name) for enabled, name, _ in found} == {(True, "DelayedScaling")}

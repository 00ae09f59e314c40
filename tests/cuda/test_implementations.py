"""Kernels of other libraries, fp8 and compiled functions on a GPU, held to the tolerances of the CPU tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megapipe.comm.groups import Group
from megapipe.config.config import Config, convert
from megapipe.config.gpu import KernelsConfig
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.dtypes import FP8_BLOCKS
from megapipe.gpu.kernels import choose_kernels, compiled
from megapipe.gpu.libraries import Apex, AttentionShape, TransformerEngine
from megapipe.model.attention import fused_attention
from megapipe.model.mlp import COMPILED, activation
from megapipe.tensor_parallel.cross_entropy import chunked_cross_entropy, vocab_parallel_cross_entropy
from megapipe.tensor_parallel.fp8 import Fp8Gemms, fp8_unsupported_reason
from megapipe.tensor_parallel.fp8_matrix import E4M3, E5M2, Fp8Tensor, fp8_matmul
from megapipe.tensor_parallel.fp8_scales import cast_to_fp8, fp8_scale
from megapipe.tensor_parallel.gradients import GradientSlot
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from tests.train.jobs import job, lines_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CARD = "cuda"


def needs_fp8(recipe: str = "tensorwise") -> None:
    why = fp8_unsupported_reason(torch.device(CARD), recipe)
    if why is not None:
        pytest.skip(why)


def cast(x: torch.Tensor, dtype: torch.dtype) -> Fp8Tensor:
    scale = fp8_scale(x.float().abs().amax(), dtype)
    return Fp8Tensor(cast_to_fp8(x, scale, dtype), scale.reciprocal())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2"])
def test_scaled_mm_is_the_emulation(dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype) -> None:
    needs_fp8()
    torch.manual_seed(0)
    a, b = cast(torch.randn(512, 256, device=CARD), dtypes[0]), cast(torch.randn(384, 256, device=CARD), dtypes[1])
    emulated = fp8_matmul(*(Fp8Tensor(x.values.cpu(), x.scale_inverse.cpu()) for x in (a, b)), torch.float32)
    torch.testing.assert_close(fp8_matmul(a, b, out_dtype).float().cpu(), emulated, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize(
    "compiles", [pytest.param(False, id="plain"), pytest.param(True, id="compiled", marks=pytest.mark.compiles)]
)
def test_an_fp8_linear_on_a_gpu_equals_one_on_a_cpu(recipe: str, compiles: bool) -> None:
    needs_fp8(recipe)
    torch.manual_seed(0)
    weight, bias, x, dy = (torch.randn(*shape).bfloat16() for shape in ((96, 64), (96,), (32, 2, 64), (32, 2, 96)))
    found = []
    fp8_format = "e4m3" if recipe in FP8_BLOCKS else "hybrid"  # torch multiplies blocks in e4m3 alone
    for device in ("cpu", CARD):
        gemms = Fp8Gemms(
            PrecisionConfig(fp8_format=fp8_format, fp8_recipe=recipe),
            compiled if compiles and device == CARD else lambda f: f,
        )
        layer = ColumnParallelLinear(64, 96, bias=True, tp=Group.alone("tp"), sequence_parallel=False, gemms=gemms)
        layer.weight, layer.bias = torch.nn.Parameter(weight.to(device)), torch.nn.Parameter(bias.to(device))
        layer.slots["weight"] = GradientSlot(torch.zeros(96, 64, device=device))
        for _ in range(2):
            gemms.begin()
            inputs = x.to(device).requires_grad_()
            y = layer(inputs)
            y.backward(dy.to(device))
        found.append([t.detach().float().cpu() for t in (y, inputs.grad, layer.slots["weight"].main_grad)])
    for cpu, card in zip(*found, strict=True):
        torch.testing.assert_close(card, cpu, rtol=3e-2, atol=0.1)


@pytest.mark.compiles
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_activation_is_the_activation(name: str) -> None:
    x, layer = torch.randn(64, 128, device=CARD), convert(LayerConfig, ModelConfig(activation=name))
    results = []
    for function in (activation(layer), activation(layer, compiled)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 3.0], ids=["plain", "cap"])
def test_a_loss_in_chunks_is_the_loss_on_a_gpu(cap: float | None) -> None:
    torch.manual_seed(0)
    linear = ColumnParallelLinear(64, 1024, bias=False, tp=Group.alone("tp"), sequence_parallel=False)
    linear.weight = torch.nn.Parameter(torch.randn(1024, 64, device=CARD))
    labels, hidden = torch.randint(1000, (128, 2), device=CARD), torch.randn(128, 2, 64, device=CARD)
    results = []
    for size in (256, 60):
        leaf, linear.weight.grad = hidden.clone().requires_grad_(), None
        losses = chunked_cross_entropy(leaf, linear, labels, 1000, size, cap=cap)
        losses.sum().backward()
        results.append((losses.detach(), leaf.grad, linear.weight.grad))
    if cap is None:
        results.append(
            (vocab_parallel_cross_entropy(linear(hidden).detach(), labels, linear.tp, 1000), *results[0][1:])
        )
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [1, 4], ids=["heads", "grouped"])
@pytest.mark.parametrize(("impl", "module"), [("flash", "flash_attn"), ("te", "transformer_engine.pytorch")])
def test_attention_of_a_library_is_that_of_torch(impl: str, module: str, queries: int) -> None:
    pytest.importorskip(module)
    library = choose_kernels(Config(kernels=KernelsConfig(attention_impl=impl))).attention
    assert library is not None
    qkv = torch.randn(256, 2, 2, queries + 2, 64, device=CARD, dtype=torch.bfloat16)
    results = []
    for attend in (
        library.attention(AttentionShape(0, queries, 64, 0.125, None, None, False)),
        lambda *x: fused_attention(*x, None, 0.125),
    ):
        leaf = qkv.clone().requires_grad_()
        output = attend(*leaf.split((queries, 1, 1), dim=3))
        output.float().square().sum().backward()
        results.append((output.detach(), leaf.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("splits", [False, True], ids=["B", "I+W"])
def test_a_linear_of_transformer_engine_adds_to_our_main_gradient(splits: bool) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    from megapipe.tensor_parallel.gradients import WeightQueue

    torch.manual_seed(0)
    library, tp, queue = TransformerEngine("", "", PrecisionConfig()), Group.alone("tp"), WeightQueue()
    options = {"sequence_parallel": False, "splits_backward": splits, "uses_fp8": False}
    layer = library.linear("column", 64, 96, bias=True, tp=tp, queue=queue, **options)
    weight, bias = (torch.randn(*shape, device=CARD).bfloat16() for shape in ((96, 64), (96,)))
    layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    layer.slots = {
        name: GradientSlot(torch.ones(shape, device=CARD)) for name, shape in (("weight", (96, 64)), ("bias", (96,)))
    }
    x = torch.randn(32, 2, 64, device=CARD).bfloat16().requires_grad_()
    dy = torch.randn(32, 2, 96, device=CARD).bfloat16()
    if splits:
        queue.defer(0)
    y = layer(x)
    y.backward(dy)
    if splits:
        assert (layer.slots["weight"].main_grad == 1).all()
        queue.immediate()
        queue.run(0)
    torch.testing.assert_close(y.detach(), torch.nn.functional.linear(x.detach(), weight, bias), rtol=2e-2, atol=2e-2)
    expected = 1 + dy.flatten(0, 1).float().t() @ x.detach().flatten(0, 1).float()
    torch.testing.assert_close(layer.slots["weight"].main_grad, expected, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("impl", ["te", "apex"])
def test_adam_of_a_library_is_that_of_torch(impl: str) -> None:
    pytest.importorskip({"te": "transformer_engine.pytorch", "apex": "fused_weight_gradient_mlp_cuda"}[impl])
    library = choose_kernels(Config(kernels=KernelsConfig(optimizer_impl=impl))).optimizer
    assert library is not None
    config, values = OptimizerConfig(), torch.randn(1000, device=CARD)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    plain = torch.optim.AdamW(
        [ours], lr=1e-2, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, weight_decay=0.1
    )
    fused = library.adam([{"params": [theirs], "step": 0}], config)
    fused.state[theirs] = {"exp_avg": torch.zeros(1000, device=CARD), "exp_avg_sq": torch.zeros(1000, device=CARD)}
    for group in fused.param_groups:
        group["lr"], group["weight_decay"] = 1e-2, 0.1
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(1000, device=CARD)
        plain.step()
        fused.step()
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


def test_apex_adds_weight_gradients_in_the_gemm() -> None:
    pytest.importorskip("fused_weight_gradient_mlp_cuda")
    gradient, inputs = (torch.randn(128, width, device=CARD).bfloat16() for width in (96, 64))
    main_grad = torch.ones(96, 64, device=CARD)
    Apex().add_outer(main_grad, gradient, inputs)
    torch.testing.assert_close(main_grad, 1 + gradient.float().t() @ inputs.float(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="fp8"),
        pytest.param("--cross-entropy-chunk-size 16", id="chunks"),
        pytest.param("--compile-pointwise", id="compiled", marks=pytest.mark.compiles),
    ],
)
def test_a_job_with_fp8_trains(flags: str, tmp_path: Path) -> None:
    needs_fp8()
    sizes = (
        "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --hidden-dropout 0 "
        "--attention-dropout 0"
    )
    code, said = job(
        f"{sizes} --bf16 --fp8 hybrid --device {CARD} --train-iters 20 --metrics-file {tmp_path}/m.jsonl {flags}"
    )
    assert code == 0, said
    assert "torch._scaled_mm" in said
    losses = [line["loss"] for line in lines_of(tmp_path / "m.jsonl") if line.get("kind") == "step"]
    assert losses[-1] < losses[0]

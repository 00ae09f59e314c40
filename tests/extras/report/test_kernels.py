"""The start of a run names the kernels that torch picks on this GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from megapipe.extras.report import kernels as module
from megapipe.gpu.kernels import Kernels
from tests.tiny import plan_for
from tests.train.jobs import TINY

META = torch.device("meta")  # stands for a GPU: what torch would ask it is answered here
WORDS = [word for word in TINY.split() if word not in ("--device", "cpu")]


@pytest.mark.parametrize(
    ("choice", "adds", "attention", "gradients"),
    [
        (SDPBackend.CUDNN_ATTENTION, True, "on this GPU: cuDNN's fused kernel", "inside their GEMMs"),
        (SDPBackend.MATH, False, "on this GPU: separate kernels, not fused", "by a kernel after their GEMMs"),
    ],
)
def test_the_kernels_are_those_that_torch_picks(
    choice: SDPBackend, adds: bool, attention: str, gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []

    def choose(q: torch.Tensor, *others: object, **flags: object) -> int:
        shapes.append(tuple(q.shape))
        return int(choice.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(module, "gemm_adds_to_fp32", lambda device, dtype: adds)
    plan = plan_for([*WORDS, "--train-iters", "1", "--bf16", "--attention-dropout", "0"], 1)
    first, second = module.active_kernels(plan, Kernels(), META)
    assert attention in first and gradients in second
    assert shapes == [(1, 1, 256, 4)]
    assert module.active_kernels(plan, Kernels(), torch.device("cpu")) == ()
    windows = plan_for([*WORDS, "--train-iters", "1", "--attention-dropout", "0", "--window-size", "4"], 1)
    assert module.active_kernels(windows, Kernels(), META)[0].endswith("under a mask")


@pytest.mark.parametrize(
    ("groups", "why", "said"),
    [
        (True, None, "in fp8 torch's grouped GEMM for e4m3, weight gradients one by one"),
        (True, "torch has none here", "in fp8 one GEMM after the other: torch has none here"),
        (False, None, "in fp8 one GEMM after the other: not asked for"),
    ],
)
def test_the_start_says_how_experts_multiply_in_micro_blocks(
    groups: bool, why: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, **flags: int(SDPBackend.MATH.value))
    monkeypatch.setattr(module, "gemm_adds_to_fp32", lambda device, dtype: True)
    monkeypatch.setattr(module, "why_no_grouped_product", lambda device: why)
    words = "--bf16 --attention-dropout 0 --num-experts 4 --moe-ffn-hidden-size 32 --fp8-format e4m3 --fp8-recipe mxfp8"
    plan = plan_for([*WORDS, "--train-iters", "1", *words.split(), "--disable-bias-linear"], 1)
    kernels = Kernels(fp8=plan.config.precision, groups_experts=groups)
    assert module.active_kernels(plan, kernels, META)[-1] == f"experts    {said}"


def test_the_kernel_of_latent_attention_is_that_of_its_narrow_values(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object, **flags: object) -> int:
        widths.append(v.shape[-1])
        return int(SDPBackend.CUDNN_ATTENTION.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    words = "--attention-dropout 0 --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8"
    words += " --qk-pos-emb-head-dim 4 --v-head-dim 6 --position-embedding-type rope"
    for more, width in (("", 6), ("--window-size 4", 12)):
        plan = plan_for([*WORDS, "--train-iters", "1", *words.split(), *more.split()], 1)
        module.active_kernels(plan, Kernels(), META)
        assert widths.pop() == width


LLAMA_8B = (
    "--hidden-size 4096 --num-layers 32 --num-attention-heads 32 --seq-length 8192 --vocab-size 32000 --bf16 "
    "--device cuda --micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --hidden-dropout 0"
).split()


@pytest.mark.parametrize(("gpu", "rates"), [("NVIDIA H200", "h200"), ("NVIDIA of tomorrow", "h100")])
def test_the_start_says_what_attention_dropout_costs(gpu: str, rates: str) -> None:
    (line,) = module.dropout_line(plan_for(LLAMA_8B, 1), gpu)
    assert line.strip().startswith("--attention-dropout 0.1 has no fused kernel: layers take ")
    assert line.endswith(f" times as long as with 0 (an estimate, with the rates of {rates})")
    assert 2.5 < float(line.split("take ")[1].split()[0]) < 4.5
    assert module.dropout_line(plan_for([*LLAMA_8B, "--attention-dropout", "0"], 1), gpu) == ()

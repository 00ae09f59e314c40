"""The start of a run names the kernels that torch picks on this GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from megapipe.config.load import load_config
from megapipe.gpu.kernels import Kernels
from megapipe.train import gpu_setup as module
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
    config = load_config([*WORDS, "--train-iters", "1", "--bf16", "--attention-dropout", "0"]).config
    first, second = module.active_kernels(config, Kernels(), META)
    assert attention in first and gradients in second
    assert shapes == [(1, 1, 256, 4)]
    assert module.active_kernels(config, Kernels(), torch.device("cpu")) == ()
    windows = load_config([*WORDS, "--train-iters", "1", "--attention-dropout", "0", "--window-size", "4"]).config
    assert module.active_kernels(windows, Kernels(), META)[0].endswith("under a mask")

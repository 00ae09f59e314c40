"""An fp64 run is fp64 everywhere; half-precision runs keep sums and rotary angles in fp32."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megapipe.extras.reference.train import build_optimizer, reference_step
from tests.extras.reference.tiny import EVERYTHING, batch, build, dropout_masks


class FloatingDtypes(TorchDispatchMode):
    """Dispatch mode that records, for each floating dtype, the operations that produced it and their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[torch.dtype, set[tuple[str, tuple[int, ...]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.seen.setdefault(tensor.dtype, set()).add((str(func), tuple(tensor.shape)))
        return result


def dtypes_of_two_steps(
    dtype: torch.dtype, optimizer: str, **changed: Any
) -> dict[torch.dtype, set[tuple[str, tuple[int, ...]]]]:
    model = build(dtype, **changed)
    torch_optimizer = build_optimizer(model, optimizer, weight_decay=0.1)
    documents = {"document_ids": torch.arange(8).expand(2, 8) // 3, "dropout_masks": dropout_masks}
    microbatches = [batch(2) | documents, batch(3)]
    with FloatingDtypes() as recorder:
        for _ in range(2):
            reference_step(
                model, torch_optimizer, microbatches, per_token_loss=True, clip_grad=0.1, lr=0.1, decoupled_lr=0.2
            )
    return recorder.seen


SHAPES = {
    f"rope {scaling}": EVERYTHING | {"rope_scaling_type": scaling} for scaling in ("none", "linear", "llama3", "yarn")
}
SHAPES |= {
    activation: {"activation": activation} for activation in ("gelu", "gelu_tanh", "relu", "squared_relu", "geglu_tanh")
}
SHAPES |= {"RMSNorm": EVERYTHING | {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False}}


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES)
def test_every_intermediate_of_an_fp64_step_is_fp64(shape):
    assert dtypes_of_two_steps(torch.float64, "sgd", **SHAPES[shape]).keys() == {torch.float64}


def test_in_adamw_only_the_step_count_is_fp32():
    """torch.optim counts steps in an fp32 scalar, exact to 2^24, and computes the bias correction in Python floats."""
    seen = dtypes_of_two_steps(torch.float64, "adamw", **EVERYTHING)
    assert seen.keys() == {torch.float64, torch.float32}
    assert seen[torch.float32] == {("aten.lift_fresh.default", ()), ("aten.add_.Tensor", ())}


def test_the_recorder_sees_fp32():
    assert len(dtypes_of_two_steps(torch.float32, "sgd", **EVERYTHING)[torch.float32]) > 100


def test_bf16_keeps_softmax_norms_rotary_tables_and_loss_in_fp32():
    seen = dtypes_of_two_steps(torch.bfloat16, "sgd", **EVERYTHING)
    operations = {dtype: {name.split(".")[1] for name, _ in seen[dtype]} for dtype in (torch.bfloat16, torch.float32)}
    at_least_fp32 = {
        "_softmax",
        "_log_softmax",
        "rsqrt",
        "mean",
        "cos",
        "sin",
        "pow",
        "logsumexp",
        "linalg_vector_norm",
    }
    assert at_least_fp32 <= operations[torch.float32]
    assert not at_least_fp32 & operations[torch.bfloat16]
    assert {"mm", "bmm", "silu", "embedding"} <= operations[torch.bfloat16]

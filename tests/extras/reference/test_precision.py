"""Half-precision runs keep sums and rotary angles in fp32."""

from typing import Any

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

"""torch's private operators of attention: the signatures on which `block_attention` relies, and the kernel it calls.

Operators without a promise of compatibility: an upgrade of torch that changes one fails here, on any machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.model.block_attention import FusedBlocks, MaskedBlock, prefers_cudnn
from megapipe.sharding.sequence import KeyBlock
from megapipe.trace.meta import MetaMode
from tests.tables import rows

NAMES = {"QKV": "query key value", "PLACES": "max_q max_k dropout_p is_causal"}
OPERATORS = rows(Path(__file__).with_name("attention_operators.tsv"), NAMES)
FLASH = "_scaled_dot_product_flash_attention"
HEADS, QUERIES, KEYS, SIZE = 3, 6, 8, 16


@pytest.mark.parametrize(("name", "arguments", "results"), OPERATORS, ids=[row[0] for row in OPERATORS])
def test_an_operator_has_the_signature_that_blocks_rely_on(name: str, arguments: str, results: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert [argument.name for argument in schema.arguments] == arguments.split()
    assert [result.name or str(result.type) for result in schema.returns] == results.split()


class Calls(TorchDispatchMode):
    """Records the operators of attention and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name:
            names = [argument.name for argument in func._schema.arguments]
            self.made.append((name, dict(zip(names, args, strict=False)) | (kwargs or {})))
        return func(*args, **(kwargs or {}))


def block_calls(blocks: FusedBlocks, channels: int = SIZE) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a forward and a backward of half of the queries, on CUDA tensors without values. channels:
    of values.
    """
    half, calls = (QUERIES // 2, QUERIES), Calls()
    block = MaskedBlock(KeyBlock(half, (0, KEYS), "all"))
    rows = slice(*half)
    with MetaMode("cuda"), calls:
        q = torch.empty(QUERIES, 2, 2, HEADS, SIZE, dtype=torch.bfloat16, device="meta")
        k, v = (torch.empty(KEYS, 2, 2, 1, n, dtype=torch.bfloat16, device="meta") for n in (SIZE, channels))
        output, lse = blocks.forward(q[rows], k, v, block, 0)
        assert output.shape == (2, 2 * HEADS, QUERIES // 2, channels) and lse.shape == output.shape[:3]
        result = torch.empty(QUERIES, 2, 2 * HEADS, channels, dtype=torch.bfloat16, device="meta")
        whole = torch.empty(2, 2 * HEADS, QUERIES, device="meta")
        grads = blocks.backward(result[rows], q[rows], k, v, result[rows], whole[:, :, rows], block, 0)
        assert [grad.shape for grad in grads] == [q[rows].shape, k.shape, v.shape]
    return calls.made


@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "flash"])
def test_a_block_runs_one_kernel_that_shares_keys(cudnn: bool) -> None:
    """The log-sum-exp of some of the queries is copied: kernels read it as contiguous."""
    name = "_scaled_dot_product_cudnn_attention" if cudnn else FLASH
    (forward, given), (backward, returned) = block_calls(FusedBlocks(1.0, cudnn))
    assert (forward, backward) == (name, f"{name}_backward")
    for each in (given, returned):
        assert each["query"].shape == (4, HEADS, QUERIES // 2, SIZE)
        assert each["key"].shape == each["value"].shape == (4, 1, KEYS, SIZE)
        assert not each.get("is_causal") and not each.get("dropout_p") and each["scale"] == 1.0
    lse: Tensor = returned["logsumexp"]
    assert lse.is_contiguous() and lse.shape == (4, HEADS, QUERIES // 2, *[1] * cudnn)
    assert (returned["max_q"], returned["max_k"]) == (QUERIES // 2, KEYS)


@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "flash"])
def test_values_narrower_than_keys_get_zeros_unless_cudnn_takes_them(cudnn: bool) -> None:
    calls = block_calls(FusedBlocks(1.0, cudnn), SIZE // 2)
    assert len(calls) == 2
    for _, arguments in calls:
        width = SIZE // 2 if cudnn else SIZE
        assert arguments["value"].shape[-1] == width and arguments["key"].shape[-1] == SIZE
        assert all(arguments[name].shape[-1] == width for name in ("out", "grad_out") if name in arguments)


def test_the_shape_of_the_log_sum_exp_is_what_cudnn_returns() -> None:
    x = torch.empty(2, 3, 5, 16, dtype=torch.bfloat16, device="meta")
    _, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)
    assert lse.shape == (2, 3, 5, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cudnn_is_not_preferred_on_a_cpu(dtype: torch.dtype) -> None:
    x = torch.empty(4, 1, 1, 1, 16, dtype=dtype)
    assert not prefers_cudnn(x, x, x, 1.0)


@pytest.fixture
def flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Activate FlashAttention 3, whose library is not installed: its two operators without a kernel."""
    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define("fwd(Tensor q) -> Tensor")
        library.define("bwd(Tensor q) -> Tensor")
        monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
        activate_flash_attention_impl("FA3")
        yield
        restore_flash_attention_impl()


@pytest.mark.usefixtures("flash_attention_3")
def test_flash_attention_3_replaces_the_operators_that_blocks_call() -> None:
    called = [name for name, _ in block_calls(FusedBlocks(1.0))]
    assert called == [FLASH, f"{FLASH}_backward"]
    assert {f"aten/{name}/CUDA" for name in called} <= torch.library._impls

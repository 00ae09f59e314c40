"""Packed documents on the fake device: the variable-length kernel runs, no mask is made, and the host reads nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.dry_run.grids import DOCUMENTS, LLAMA

pytestmark = pytest.mark.timeout(300)
TWO_LAYERS = {"num_layers": 2, "global_batch_size": 2, "dtype": "bf16"}
# in a forward: q of several groups is put into the kernel's order, and k and v with it, so that their tensor is freed
COPIES = 3


def attention_kernels(seen: Any) -> Counter[str]:
    """Return the kernels of core attention by name, and those that make masks."""
    assert not seen.error, seen.error
    found: Counter[str] = Counter()
    for key, count in seen.kernels.items():
        where, name = key.rsplit(" ", 1)
        if (
            "attn" in name
            or "attention" in name
            or where.startswith(("gpu/packed_attention", "model/context.py:_mask"))
        ):
            found[name] += count
        if where.startswith(("model/context.py:additive", "model/context.py:causal")):
            found["mask"] += count
    return found


@pytest.mark.parametrize("window", [None, 32], ids=["", "window"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_documents_run_without_a_mask(run: Callable[..., Any], micro_batch_size: int, window: int | None) -> None:
    changes = TWO_LAYERS | DOCUMENTS | {"micro_batch_size": micro_batch_size, "window_size": window}
    seen = run(1, 0, changes, LLAMA)
    found, uses = attention_kernels(seen), 2 * 2 // micro_batch_size  # layers x microbatches
    assert found["torch_attn._varlen_attn"] == found["torch_attn._varlen_attn_backward"] == uses
    assert not found["mask"] and not any("scaled_dot_product" in name for name in found)
    others = sum(count for name, count in found.items() if "varlen" not in name)
    assert others == uses * (COPIES + (micro_batch_size > 1)), found  # several sequences: the output too
    assert not seen.host_reads and not seen.pageable_copies and not seen.mixed_devices
    assert seen.planned_bytes["microbatches"] >= seen.counted_bytes.get("microbatches", 0)


@pytest.mark.parametrize("changes", [{"dtype": "fp32"}, {"attn_logit_softcapping": 30.0}], ids=["fp32", "soft_cap"])
def test_what_the_kernel_lacks_has_a_mask(run: Callable[..., Any], changes: dict[str, Any]) -> None:
    found = attention_kernels(run(1, 0, TWO_LAYERS | DOCUMENTS | changes, LLAMA))
    assert found["mask"] and not any("varlen" in name for name in found)

"""Blocks compiled on the fake device: one graph without breaks, or one for each region between collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megapipe.extras.dry_run.rank import STATE
from tests.extras.dry_run.grids import FULL, LLAMA, PP2, SP2, TP2, selective
from tests.fake_cuda.test_steps import CLOSE, HOST_READS

pytestmark = pytest.mark.timeout(300)
BASE = LLAMA | {"num_layers": 2, "dtype": "bf16", "compile_blocks": "on"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {}),
    "gpt with dropout": (1, DROPOUT | {"normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True}),
    "window, fp16": (1, {"window_size": 32, "dtype": "fp16"}),
    "full recompute": (1, FULL),
    "selective recompute": (1, selective("layernorm", "mlp")),
    "zb-h1": (2, PP2 | {"pipeline_schedule": "zb-h1"}),
    "dualpipe": (2, PP2 | {"pipeline_schedule": "dualpipe", "num_layers": 4, "global_batch_size": 8}),
    "tp2": (2, TP2),
    "tp2, sequence parallel": (2, SP2),
}


WHOLE = {"block": 2}  # graphs of each function, forward and backward
REGIONS = dict.fromkeys(("norm", "heads", "add_and_norm", "activation", "add"), 2)
# a recomputed function has a graph without gradients, too
GRAPHS: dict[str, dict[str, int]] = {
    "full recompute": {"block": 3},
    "selective recompute": {"norm": 3, "heads": 2, "add": 2, "activation": 3},
    "tp2": REGIONS,
    "tp2, sequence parallel": REGIONS,
}
PRODUCTS = ("mm", "addmm")
SYNCHRONIZING = {"_local_scalar_dense", "equal", "nonzero", "masked_select"}  # the host waits for their results
ATTENTION = "_scaled_dot_product_flash_attention"


@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_keep_to_the_device(name: str, run: Callable[..., Any]) -> None:
    """Trial, two steps: no graph breaks or graphs of other shapes, weight gradients and collectives outside."""
    world_size, changes = CASES[name]
    seen = run(world_size, 0, {"global_batch_size": 4} | changes, BASE)
    assert not seen.error, seen.error
    assert seen.said.startswith("blocks are compiled: ")
    assert not seen.mixed_devices and not seen.pageable_copies and set(seen.host_reads) <= HOST_READS
    assert {function: len(each) for function, each in seen.graphs.items()} == GRAPHS.get(name, WHOLE)
    for graph in (each for graphs in seen.graphs.values() for each in graphs):
        assert not SYNCHRONIZING & set(graph)
        assert sum(graph.get(product, 0) for product in PRODUCTS) == (4 if "block" in seen.graphs else 0)
    if name in ("llama", "zb-h1", "dualpipe"):
        forward, backward = seen.graphs["block"]
        assert forward[ATTENTION] == backward[f"{ATTENTION}_backward"] == 1
    assert {item: seen.counted_bytes[item] for item in STATE} == {item: seen.planned_bytes.get(item, 0) for item in STATE}
    counted, planned = (sum(each.values()) for each in (seen.counted_bytes, seen.planned_bytes))
    # the plan has the temporaries of attention with dropout, which here are inside a graph
    assert (1 - CLOSE) * planned * ("dropout" not in name) < counted < (1 + CLOSE) * planned


@pytest.mark.parametrize(
    ("plant", "error"),
    [
        ("graph_break", "Unsupported: Call to `torch._dynamo.graph_break()`"),
        ("host_read_in_a_graph", "DynamicOutputShapeException: aten.nonzero"),
    ],
)
def test_a_mistake_in_a_block_is_found(plant: str, error: str, run: Callable[..., Any]) -> None:
    assert error in run(1, 0, {"global_batch_size": 4}, BASE, plant).error

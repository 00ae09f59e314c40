"""Blocks compiled on the fake device: one graph without breaks, or one for each region between collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.dry_run.grids import FULL, LLAMA, PP2, SP2, TP2, selective
from tests.extras.dry_run.test_planned import STATE
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
SYNCHRONIZES = "_local_scalar_dense"
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
        assert SYNCHRONIZES not in graph
        assert sum(graph.get(product, 0) for product in PRODUCTS) == (4 if "block" in seen.graphs else 0)
    if name in ("llama", "zb-h1", "dualpipe"):
        assert [
            graph.get(f"{ATTENTION}{end}") for graph, end in zip(seen.graphs["block"], ("", "_backward"), strict=True)
        ] == [1, 1]
    print(sum(seen.counted_bytes.values()) / sum(seen.planned_bytes.values()), seen.seconds)
    assert {item: seen.counted_bytes[item] for item in STATE} == {item: seen.planned_bytes[item] for item in STATE}
    assert sum(seen.counted_bytes.values()) == pytest.approx(sum(seen.planned_bytes.values()), rel=CLOSE)


def test_a_graph_break_is_an_error(run: Callable[..., Any]) -> None:
    seen = run(1, 0, {"global_batch_size": 4}, BASE, "graph_break")
    assert "--compile-blocks on: a compiled block is not the eager one: compiling failed" in seen.error, seen.error


def test_a_host_read_inside_a_graph_is_found(run: Callable[..., Any]) -> None:
    seen = run(1, 0, {"global_batch_size": 4}, BASE, "host_read_in_a_graph")
    assert not seen.error and any(SYNCHRONIZES in graph for graph in seen.graphs["block"]), seen

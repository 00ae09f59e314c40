"""Blocks compiled on the fake device: a graph without breaks for the segments between two operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megapipe.extras.dry_run.rank import STATE
from tests.extras.dry_run.grids import FULL, LLAMA, PP2, SP2, TP2, selective
from tests.fake_cuda.test_steps import HOST_READS

pytestmark = pytest.mark.timeout(300)
BASE = LLAMA | {"num_layers": 2, "dtype": "bf16", "compile_blocks": "on"}
CLOSE = 0.06  # of models of few layers, in which what is planned roughly weighs more
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


NAMES = ("input_layernorm", "heads", "add_and_pre_mlp_layernorm", "activation", "add")
REGIONS = dict.fromkeys(NAMES, 2)  # forward and backward
# a recomputed function has a graph without gradients, too
GRAPHS: dict[str, dict[str, int]] = {
    "full recompute": dict.fromkeys(REGIONS, 3),
    # both norms share theirs, and the second is recomputed with gradients, too
    "selective recompute": {"input_layernorm": 4, "heads": 2, "add": 2, "activation": 3},
}
PRODUCTS = ("mm", "addmm")
SYNCHRONIZING = {"_local_scalar_dense", "equal", "nonzero", "masked_select"}  # the host waits for their results
ATTENTION = "_scaled_dot_product_flash_attention"


@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_keep_to_the_device(name: str, run: Callable[..., Any]) -> None:
    """Trial, two steps: no graph breaks or graphs of other shapes; products, attention and collectives outside."""
    world_size, changes = CASES[name]
    seen = run(world_size, 0, {"global_batch_size": 4} | changes, BASE)
    assert not seen.error, seen.error
    assert seen.said.startswith("blocks are compiled: ")
    assert not seen.mixed_devices and not seen.pageable_copies and set(seen.host_reads) <= HOST_READS
    assert {function: len(each) for function, each in seen.graphs.items()} == GRAPHS.get(name, REGIONS)
    for graph in (each for graphs in seen.graphs.values() for each in graphs):
        assert not SYNCHRONIZING & set(graph)
        assert not {*PRODUCTS, ATTENTION} & set(graph)
    assert {item: seen.counted_bytes[item] for item in STATE} == {
        item: seen.planned_bytes.get(item, 0) for item in STATE
    }
    counted, planned = (sum(each.values()) for each in (seen.counted_bytes, seen.planned_bytes))
    assert (1 - CLOSE) * planned < counted < (1 + CLOSE) * planned


@pytest.mark.parametrize(
    ("plant", "error"),
    [
        ("graph_break", "compiling failed: Call to `torch._dynamo.graph_break()`"),
        ("host_read_in_a_graph", "compiling failed: aten.nonzero"),
    ],
)
def test_a_mistake_in_a_block_is_found(plant: str, error: str, run: Callable[..., Any]) -> None:
    assert error in run(1, 0, {"global_batch_size": 4}, BASE, plant).error

"""No race in any kind of step on the fake device, and one for every planted mistake. `order` says what is checked.

test_recipes.py runs published combinations, which include the other kinds of context parallelism.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megapipe.extras.streams import device
from tests.extras.dry_run.grids import (
    BLOCKS,
    FP8,
    FULL,
    LLAMA,
    OVERLAP,
    PP2,
    PP4,
    SP2,
    TP2,
    UNITS,
    UNLIKE,
    ZERO1,
    ZERO2,
    ZERO3,
    selective,
)

pytestmark = pytest.mark.timeout(300)
Found = Callable[..., dict[str, Any]]
V2 = {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4}
OVERLAPPED = ZERO1 | {"overlap_grad_reduce": True, "overlap_param_gather": True}
OFFLOAD = {"cpu_offloading_num_layers": 4, "min_offloaded_tensor_size": 1, "num_layers": 4}
GRAPHS = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPERTS = {
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_ffn_hidden_size": 64,
    "moe_router_topk": 2,
    "add_bias_linear": False,
}
PARTS = PP2 | EXPERTS | {"overlap_moe_expert_parallel_comm": True, "num_layers": 4, "global_batch_size": 8}
PADDED = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
ONCE = {"moe_token_dispatcher_type": "flex", "ranks_per_node": 2, "expert_model_parallel_size": 4, "num_experts": 8}
CP2 = {"context_parallel_size": 2, "cp_comm_type": ("p2p",)}
EIGHT = {"global_batch_size": 8}
LATENT = UNLIKE["latent"] | {"hidden_size": 128, "num_attention_heads": 8}
DEPTH_4 = {"pipeline_receive_depth": 4}


def schedule(name: str, **changes: Any) -> dict[str, Any]:
    return {"pipeline_schedule": name, **changes}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "sp2_in_chunks": (2, SP2 | OVERLAP),
    "zero1": (2, OVERLAPPED | {"ddp_bucket_size": 5_000}),
    "host_optimizer": (1, {"optimizer_cpu_offload": True}),
    "host_optimizer_zero1": (2, OVERLAPPED | {"optimizer_cpu_offload": True}),
    "pp2": (2, PP2),
    "pp4": (4, PP4 | {"num_layers": 4}),
    "zb_v": (2, PP2 | V2 | schedule("zb-v")),
    "dualpipe": (2, PP2 | schedule("dualpipe")),
    "dualpipe_pp4": (4, PP4 | schedule("dualpipe", num_layers=4, global_batch_size=8)),
    "dualpipe_v_tied_depth_2": (
        2,
        PP2 | V2 | schedule("dualpipe-v", untie_embeddings_and_output_weights=False, pipeline_receive_depth=2),
    ),
    "pipedream_2bw": (2, PP2 | schedule("pipedream-2bw", clip_grad=0.0)),
    "offload": (1, OFFLOAD),
    "offload_pp2": (2, OFFLOAD | PP2),
    "graphs": (1, GRAPHS),
    "graphs_pp2": (2, GRAPHS | PP2),
    "experts_in_parts_dualpipe_v": (4, PARTS | {"pipeline_schedule": "dualpipe-v"}),
    "experts_in_parts_interleaved": (4, PARTS | {"num_virtual_stages_per_pipeline_rank": 2}),
    # every other schedule, and every other option that launches further work, in few cases
    "gpipe_depth_4_fp16": (2, PP2 | DEPTH_4 | schedule("gpipe", dtype="fp16")),
    "interleaved_depth_4_full_recompute": (2, PP2 | V2 | DEPTH_4 | FULL),
    "breadth_first_depth_4_dropout": (2, PP2 | V2 | DEPTH_4 | DROPOUT | schedule("breadth-first")),
    "zb_h1_dp2_selective_recompute": (
        4,
        PP2 | selective("core_attn", "layernorm", "mlp") | schedule("zb-h1", overlap_grad_reduce=True),
    ),
    "zb_h2_fp8": (2, PP2 | FP8 | schedule("zb-h2")),
    "v_half_depth_4_full_recompute_dropout": (2, PP2 | V2 | DEPTH_4 | FULL | DROPOUT | schedule("v-half")),
    "v_min_selective_recompute": (2, PP2 | V2 | selective("activation", "layernorm") | schedule("v-min")),
    "pipedream_depth_4": (2, PP2 | DEPTH_4 | schedule("pipedream", clip_grad=0.0)),
    "pipedream_2bw_dp2_depth_4": (4, PP2 | DEPTH_4 | schedule("pipedream-2bw", clip_grad=0.0, global_batch_size=8)),
    "dp2": (2, {"overlap_grad_reduce": True, "ddp_bucket_size": 5_000}),
    "dp2_reduced_at_the_end_in_bf16": (2, {"overlap_grad_reduce": False, "grad_reduce_in_bf16": True}),
    "tp2_fp16": (2, TP2 | {"dtype": "fp16"}),
    "zb_h1_sp2_in_chunks_fp8": (4, PP2 | SP2 | OVERLAP | FP8 | schedule("zb-h1")),
    "graphs_zb_h1": (2, GRAPHS | PP2 | schedule("zb-h1")),
    "graphs_interleaved": (2, GRAPHS | PP2 | V2),
    "graphs_sp2_in_chunks": (2, GRAPHS | SP2 | OVERLAP),
    # sharded weights and gradients, experts, long sequences
    "zero2_zb_h1": (4, PP2 | ZERO2 | EIGHT | schedule("zb-h1", overlap_grad_reduce=True, ddp_bucket_size=5_000)),
    "zero3_units": (2, ZERO3 | UNITS | {"num_layers": 4}),
    "zero3_units_breadth_first_latent": (4, LATENT | PP2 | V2 | ZERO3 | UNITS | EIGHT | schedule("breadth-first")),
    "zero3_units_dualpipe": (4, PP2 | ZERO3 | UNITS | schedule("dualpipe", num_layers=8, global_batch_size=8)),
    "hsdp": (4, ZERO3 | UNITS | EIGHT | {"num_layers": 4, "num_distributed_optimizer_instances": 2}),
    "muon_zero1": (2, LLAMA | OVERLAPPED | {"optimizer": "muon", "muon_tp_mode": "duplicated"}),
    "experts_zero3_mtp": (
        2,
        EXPERTS | ZERO3 | UNITS | {"mtp_num_layers": 1, "position_embedding_type": "rope"},
    ),
    "experts_padded_grouped_zb_h1": (4, PP2 | EXPERTS | PADDED | EIGHT | schedule("zb-h1", moe_grouped_gemm=True)),
    "experts_once_to_a_node_added_there": (4, EXPERTS | ONCE | {"moe_combine_in_node": True}),
    "experts_once_to_a_node_in_parts": (8, PARTS | ONCE | schedule("dualpipe-v", global_batch_size=16)),
    "experts_in_parts_zero3": (4, PARTS | ZERO3 | UNITS | schedule("dualpipe-v")),
    "cp2_p2p_fp8_by_blocks": (2, CP2 | LLAMA | BLOCKS | {"hidden_size": 256, "seq_length": 64}),
    "cp4_p2p": (4, CP2 | {"context_parallel_size": 4}),
    "slices_zb_h1": (2, PP2 | schedule("zb-h1", pipe_sp_splits=2, attention_dropout=0.0)),
}
# plant -> the case in which it is made, and words of both places
FOUND: dict[str, tuple[str, str, str]] = {
    "no fork": ("dualpipe", "write on the default stream", "read on stream"),
    "no join": ("dualpipe", "stream", "stream"),
    "no event after a copy": ("offload", "copy_ in pipeline/offload.py:copy", "default stream"),
    "host buffer overwritten": ("offload_pp2", "offload.py:copy", "offload.py:copy"),
    "copied into memory in use": ("offload", "", "copy_ in pipeline/offload.py:copy"),
    "released during the copy": ("offload", "read on stream", "freed in"),
    "message not waited for": ("pp2", "receive", "default stream"),
    "receive buffer reused": ("pp2", "receive in", "read on the default stream"),
    "sent tensor freed": ("pp2", "send", "freed"),
    "reduced before the backward": ("zero1", "reduce_scatter in data_parallel/store.py", "default stream"),
    "reduction not waited for": ("zero1", "reduce_scatter in data_parallel/store.py", "default stream"),
    "parameters not waited for": ("zero1", "all_gather in data_parallel/store.py", "read on the default stream"),
    "sum over tp not waited for": ("tp2_fp16", "all_reduce in tensor_parallel/gemms.py", "default stream"),
    "chunk's sum not waited for": (
        "sp2_in_chunks",
        "reduce_scatter in tensor_parallel/gemms.py:summed_product",
        "default",
    ),
    "chunk not waited for": ("sp2_in_chunks", "all_gather in tensor_parallel/gemms.py", "default stream"),
    "rows freed while they are sent": (
        "experts_in_parts_dualpipe_v",
        "read on NCCL's stream of ep by all_to_all in model/dispatch.py:start_exchange",
        "use of its memory for other tensors",
    ),
    "gather of weights not waited for": (
        "zero3_units",
        "all_gather in data_parallel/store.py:gather",
        "read on the default stream",
    ),
    "gradients freed while they are reduced": (
        "zero2_zb_h1",
        "reduce_scatter in data_parallel/store.py:_launch",
        "use of its memory for other tensors",
    ),
    "ring's buffer overwritten": (
        "cp2_p2p_fp8_by_blocks",
        "read on NCCL's stream of cp",
        "zero_ in",
    ),
    "host update without wait": ("host_optimizer", "default stream", "host"),
    "sent from a graph": ("graphs_pp2", "send", "graph of"),
}


# case -> place of a collective or message -> the least share of them during which something is computed
REDUCTIONS, GATHERS = "reduce_scatter in data_parallel/store.py:_launch", "all_gather in data_parallel/store.py:gather"
DURING: dict[str, dict[str, float]] = {
    "zero3_units": {GATHERS: 0.6, REDUCTIONS: 0.7},
    "zero3_units_dualpipe": {GATHERS: 0.8, REDUCTIONS: 0.8, "receive": 0.7},
    "zero1": {REDUCTIONS: 0.7},
    "dp2": {"all_reduce in data_parallel/store.py:_launch": 0.7},
    "sp2_in_chunks": {
        "all_gather in tensor_parallel/gemms.py:launch": 0.7,
        "reduce_scatter in tensor_parallel/gemms.py:summed_product": 0.7,
    },
    "cp4_p2p": {"shift in model/context_parallel.py:shift": 0.8},
    "experts_in_parts_dualpipe_v": {"all_to_all in model/dispatch.py:start_exchange": 0.3},
    "pp2": {"receive": 0.8},
}


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    """Runs steps in one process that has the fake device: (case, plant) -> `races_of`'s result."""
    why = device.missing()
    if why is not None:
        pytest.skip(f"no fake CUDA device: {why}")
    command = [sys.executable, "-m", "tests.fake_cuda.ordered_steps", str(device.build())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def ask(case: str, plant: str = "") -> dict[str, Any]:
            world_size, changes = CASES[case]
            num_steps = 3 if "cuda_graph_impl" in changes else 2
            given = {"world_size": world_size, "changes": changes, "num_steps": num_steps, "plant": plant}
            print(json.dumps(given), file=asked, flush=True)
            line = answers.readline()
            assert line, "the process with the fake device has died"
            result: dict[str, Any] = json.loads(line)
            assert not result["error"], result["error"]
            assert result["entries"] > 250
            return result

        yield ask
        asked.close()


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_no_race_and_computes_during_messages(case: str, found: Found) -> None:
    result = found(case)
    assert result["races"] == []
    for place, least in DURING.get(case, {}).items():
        assert share(result, place) >= least, result["overlaps"]


@pytest.mark.parametrize("plant", FOUND)
def test_a_planted_mistake_is_a_race_with_both_places(plant: str, found: Found) -> None:
    case, earlier, later = FOUND[plant]
    pairs = [race.split("  <->  ") for race in found(case, plant)["races"]]
    assert [each for each in pairs if earlier in each[0] and later in each[1]], pairs


@pytest.mark.parametrize("case", [case for case, places in DURING.items() if set(places) != {"receive"}])
def test_a_wait_at_once_leaves_no_computation_during_collectives(case: str, found: Found) -> None:
    """Races aside, since an immediate wait makes none."""
    result = found(case, "collectives waited for at once")
    for place, least in DURING[case].items():
        assert (share(result, place) < least) == (place != "receive"), result["overlaps"]


@pytest.mark.parametrize(
    ("case", "plant"),
    [
        ("pp2", "messages waited for at once"),
        ("interleaved_depth_4_full_recompute", "receives in another order"),
    ],
)
def test_messages_that_cannot_be_matched_hang(case: str, plant: str, found: Found) -> None:
    with pytest.raises(AssertionError, match="never begins"):
        found(case, plant)


def share(result: dict[str, Any], place: str) -> float:
    """Return the share of the launches in a place after which something is computed before the wait."""
    counts = [count for each, found in result["overlaps"].items() if each.startswith(place) for count in found]
    assert counts, result["overlaps"]
    return sum(count > 0 for count in counts) / len(counts)

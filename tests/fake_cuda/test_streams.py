"""No race in any kind of step on the fake device, and one for every planted mistake. `order` says what is checked.

test_recipes.py runs published combinations, which include the other kinds of context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extras.dry_run import grids
from tests.extras.dry_run.grids import PP2, UNLIKE, ZERO1
from tests.fake_cuda.answers import answers_of
from tests.tables import options, rows

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
SETS = vars(grids) | globals()
TABLE = rows(Path(__file__).with_name("streams.tsv"))
CASES = {name: (int(ranks), options(words, SETS)) for kind, ranks, words, name in TABLE if kind == "case"}
# plant -> the case in which it is made, and words of both places
FOUND = {plant: (case, *places.split(" & ")) for kind, case, places, plant in TABLE if kind == "found"}


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
def found(fake_device: None) -> Iterator[Found]:
    """Runs steps in one process that has the fake device: (case, plant) -> `races_of`'s result."""
    with answers_of("ordered_steps") as answer:

        def ask(case: str, plant: str = "") -> dict[str, Any]:
            world_size, changes = CASES[case]
            num_steps = 3 if "cuda_graph_impl" in changes else 2
            result: dict[str, Any] = answer(
                {"world_size": world_size, "changes": changes, "num_steps": num_steps, "plant": plant}
            )
            assert not result["error"], result["error"]
            assert result["entries"] > 250
            return result

        yield ask


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

"""Bytes that attention sends over cp: those of the plan, of the code, and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.config.config import resolve_model
from megapipe.extras.dry_run.rank import count_rank, random_reader
from megapipe.layers.model import model_spec, rank_shape
from megapipe.plan.traces import layer_trace, sent_bytes
from megapipe.plan.traffic import step_bytes
from megapipe.schedule.action import Op
from tests.extras.dry_run.grids import FULL, LLAMA, PP2, SP2, UNLIKE, make_plan, selective
from tests.tiny import make_config

KINDS: dict[str, dict[str, Any]] = {
    "p2p": {"cp_comm_type": ("p2p",)},
    "all_gather": {"cp_comm_type": ("all_gather",)},
    "a2a": {"cp_comm_type": ("a2a",)},
    "a2a+p2p": {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
}
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (4, {}),
    "window": (4, {"window_size": 5}),
    "window bf16": (4, {"window_size": 5, "dtype": "bf16"}),
    "slices bf16": (8, PP2 | {"pipe_sp_splits": 2, "attention_dropout": 0.0, "dtype": "bf16"}),
    "core_attn bf16": (4, selective("core_attn") | {"dtype": "bf16"}),
    "full, pp 2, tp 2": (16, FULL | PP2 | SP2 | {"num_query_groups": 8}),
    "one key/value head for two ranks": (4, {"num_query_groups": 2}),
    "latent": (4, UNLIKE["latent"]),
    "latent, core_attn": (4, UNLIKE["latent"] | selective("core_attn")),
    "latent, projected up again": (4, UNLIKE["latent"] | selective("mla_up_proj")),
    "latent, projected up again, core_attn": (4, UNLIKE["latent"] | selective("mla_up_proj", "core_attn")),
    "keeps attention": (4, FULL | {"recompute_keep_attention": True}),
    "memory budget": (4, {"recompute_memory_budget": 0.2}),
}
SHARE_SENT = {"all_gather": 3 / 4, "reduce_scatter": 3 / 4, "shift": 1.0, "all_to_all": 3 / 4}  # of the whole tensor


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_sends_the_planned_bytes_over_cp(kind: str, options: str) -> None:
    world_size, changes = OPTIONS[options]
    base = LLAMA | {"num_query_groups": 4, "context_parallel_size": 4, "num_layers": 4, "device": "cpu"}
    plan = make_plan(world_size, base | KINDS[kind] | changes)
    for rank in (0, world_size - 1):
        traffic = count_rank(plan, rank, random_reader(plan), "cpu").traffic
        assert traffic is not None
        sent = dict.fromkeys(("cp", "cp_a2a", "cp_p2p"), 0.0)
        for (group, operation), num_bytes in traffic.bytes.items():
            if group in sent:
                sent[group] += num_bytes * (1 / 2 if group == "cp_a2a" else SHARE_SENT[operation])
        planned = step_bytes(plan, plan.topology.coordinates(rank).pp_rank)
        assert sent == {group: planned.get(group, 0.0) for group in sent}
        assert sum(sent.values()) > 0


def test_a_window_leaves_out_the_ring_steps_that_no_rank_needs() -> None:
    whole, window = (make_plan(8, {"context_parallel_size": 8, "window_size": size}) for size in (None, 9))
    # of 7 steps two: the neighbours of both chunks
    assert step_bytes(window, 0)["cp"] == step_bytes(whole, 0)["cp"] * 2 / 7


@pytest.mark.parametrize(("kind", "forward", "backward"), [("p2p", 470e6, 940e6), ("a2a", 294e6, 294e6)])
def test_llama3_8b_at_131072_tokens_sends_what_the_papers_formulas_say(
    kind: str, forward: float, backward: float
) -> None:
    config = make_config(
        num_layers=2,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        seq_length=131072,
        context_parallel_size=8,
        cp_comm_type=(kind,),
        dtype="bf16",
        vocab_size=128256,
    )
    shape = rank_shape(config, 1, False, 1)
    layer = model_spec(resolve_model(config.model, 1), config.precision, (kind,)).layers[0]
    found = dict.fromkeys((Op.F, Op.I), 0.0)
    for message in layer_trace(layer, shape).messages:
        found[message.op] += sent_bytes(message, shape)
    assert list(found.values()) == pytest.approx([forward, backward], rel=2e-3)


@pytest.mark.parametrize("ranks", [{"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}])
def test_a_dry_run_of_few_microbatches_counts_the_messages_of_all(ranks: dict[str, Any]) -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 64, "moe_aux_loss_coeff": (0.1,)} | ranks
    plan = make_plan(
        2, LLAMA | experts | {"context_parallel_size": 2, "global_batch_size": 32, "num_layers": 2, "device": "cpu"}
    )
    few, full = (count_rank(plan, 0, random_reader(plan), "cpu", in_full=in_full) for in_full in (False, True))
    assert few.num_run < full.num_run
    assert few.traffic is not None and full.traffic is not None
    assert few.traffic.bytes == full.traffic.bytes

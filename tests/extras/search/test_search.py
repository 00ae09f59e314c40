"""The search returns legal layouts, matches an exhaustive search, never loses with more memory, and reports errors.

Objectives are compared with an exhaustive search over the number of accelerators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.config import Config
from megapipe.config.parallel import SHARDED_GRADS, SHARDED_PARAMS, RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.extras.search.layout import (
    ASPECTS,
    LEAST_TOKENS,
    NO_CONTEXT,
    RECOMPUTES,
    Context,
    Layout,
    difference,
    groups,
    layouts,
)
from megapipe.extras.search.search import Objective, choose, family, predict, search
from megapipe.extras.search.search_report import reasons
from megapipe.plan.hardware import GIB, Hardware, Link, hardware_named
from megapipe.plan.resolve import resolve, vary
from tests.tiny import small_config

# models are so small here that buffers of NCCL would be most of their memory
H100 = dataclasses.replace(hardware_named("h100"), nccl_bytes=0)
FAMILIES = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("v-half", 2),
    ("v-min", 2),
)
BOTH = (True, False)


def small(**changes: object) -> Config:
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 512}
    return small_config(**{**model, "dtype": "bf16", "global_batch_size": 8, **changes})


def with_memory(gib: float) -> Hardware:
    return dataclasses.replace(H100, memory_bytes=int(gib * GIB))


def tight(config: Config, world_size: int) -> float:
    """Return a memory size in GiB that some layouts fit into and others do not."""
    peaks = sorted(each.peak_bytes for each in search(config, world_size, H100, num_best=50).best)
    return peaks[len(peaks) // 3] / H100.memory_share / GIB


@pytest.mark.parametrize(
    ("world_size", "changes", "recomputes"),
    [
        (4, {}, RECOMPUTES[1:2]),
        (
            4,
            {"num_layers": 6, "hidden_dropout": 0.0, "attention_dropout": 0.0, "global_batch_size": 4},
            RECOMPUTES[::2],
        ),
        (2, {"num_layers": 3, "num_attention_heads": 2}, RECOMPUTES),
        (
            2,
            {
                "num_layers": 5,
                "position_embedding_type": "rope",
                "layer_pattern": ("2 window_size=16 rotary_base=100", "1 attention=none ffn_hidden_size=128", "..."),
                "norm_position": "around",
                "attention_dropout": 0.0,
            },
            RECOMPUTES[2:3],
        ),
    ],
    ids=["explicit attention", "fused attention", "an uneven cut", "layers that differ"],
)
def test_the_best_layout_equals_an_exhaustive_search(
    world_size: int, changes: dict[str, object], recomputes: tuple[RecomputeConfig, ...]
) -> None:
    config = small(**changes)
    choices = itertools.product(
        (1, 2, 4), (1, 2, 4), FAMILIES, (1, 2, 4, 8), recomputes, BOTH, BOTH, ("cost", "even", "ends")
    )
    every = []
    for tp, pp, (schedule, chunks), size, recompute, sliced, sharded, cut in choices:
        if tp * pp > world_size or (tp == 1 and sliced):
            continue
        try:
            every.append(
                predict(
                    config, Layout(tp, pp, chunks, schedule, size, recompute, sliced, sharded, cut), world_size, H100
                )
            )
        except ConfigError:
            continue
    sharded = [("1f1b", 1, -(-config.model.num_layers // pp), pp) for pp in (1, 2, 4)]
    sharded += [(name, chunks, 1, 2) for name in ("interleaved", "breadth-first") for chunks in (2, 3)]
    for tp, (schedule, chunks, units, pp), size, recompute, strategy in itertools.product(
        (1, 2), sharded, (1, 2, 4, 8), recomputes, SHARDED_GRADS
    ):
        layout = Layout(tp, pp, chunks, schedule, size, recompute, tp > 1, sharding=strategy, units=units)
        if tp * pp < world_size:
            with contextlib.suppress(ConfigError):
                every.append(predict(config, layout, world_size, H100))
    for hardware in (
        H100,
        with_memory(sorted(each.peak_bytes for each in every)[len(every) // 10] / H100.memory_share / GIB),
    ):
        fitting = [each.time.seconds for each in every if each.peak_bytes <= hardware.usable_bytes]
        assert len(fitting) > 10
        best = search(config, world_size, hardware, lambda layout: layout.recompute in recomputes).best
        assert best[0].time.seconds == pytest.approx(min(fitting), rel=1e-3)
        assert all(each.peak_bytes <= hardware.usable_bytes for each in best)


def test_every_layout_found_is_accepted_by_training() -> None:
    config = small()
    for each in search(config, 4, H100).best:
        plan = resolve(each.layout.applied_to(config), 4, H100.ranks_per_node)
        assert (plan.topology.tp, plan.topology.pp, plan.schedule_name) == (
            each.layout.tp,
            each.layout.pp,
            each.layout.schedule,
        )


def test_more_memory_never_makes_the_best_slower() -> None:
    config = small()
    least = tight(config, 4)
    times = [search(config, 4, with_memory(least * factor)).best[0].time.seconds for factor in (1.0, 1.1, 1.3, 2.0)]
    assert times == sorted(times, reverse=True)


@given(st.tuples(st.floats(1.0, 8.0), st.floats(1.0, 8.0), st.floats(1.0, 8.0)))
@settings(max_examples=4, deadline=None)
def test_faster_links_and_memory_never_make_the_best_slower(factors: tuple[float, float, float]) -> None:
    def times(link: Link, factor: float) -> Link:
        return dataclasses.replace(link, bytes_per_second=link.bytes_per_second * factor)

    faster = dataclasses.replace(
        H100,
        node=times(H100.node, factors[0]),
        network=times(H100.network, factors[1]),
        memory_bytes_per_second=H100.memory_bytes_per_second * factors[2],
    )
    two_nodes = {"ranks_per_node": 2}
    usual, better = (
        dataclasses.replace(hardware, **two_nodes)  # type: ignore[arg-type]
        for hardware in (H100, faster)
    )
    assert best_seconds(better) <= best_seconds(usual) * (1 + 1e-9)


def best_seconds(hardware: Hardware) -> float:
    return search(small(num_layers=2, global_batch_size=4), 4, hardware, num_best=3).best[0].time.seconds


def test_vary_equals_resolve() -> None:
    first, second = small(), small(micro_batch_size=1, global_batch_size=16, recompute_granularity="selective")
    assert vary(resolve(first, 2), second) == resolve(second, 2)


def test_without_a_global_batch_or_a_fitting_model_a_remedy_is_given() -> None:
    with pytest.raises(ConfigError, match="--global-batch-size is missing"):
        search(small(global_batch_size=None), 4, H100)
    with pytest.raises(ConfigError, match=r"does not fit on 4 h100.*use more"):
        search(small(), 4, with_memory(0.0001))
    with pytest.raises(ConfigError, match="must be a multiple of the data-parallel size"):
        search(small(global_batch_size=7, num_layers=1, num_attention_heads=1), 64, H100)
    three = small(num_distributed_optimizer_instances=3, use_distributed_optimizer=True)
    with pytest.raises(ConfigError, match="--num-distributed-optimizer-instances 3"):
        search(three, 4, H100, lambda layout: layout.instances == 3)


def two_a_node(gib: float) -> Hardware:
    return dataclasses.replace(H100, ranks_per_node=2, memory_bytes=int(gib * GIB))


TWO_A_NODE = two_a_node(0.15)
WIDE = small(num_layers=8, hidden_size=512, vocab_size=2048, global_batch_size=16)


def is_plain(layout: Layout) -> bool:
    return layout.schedule == "1f1b" and layout.micro_batch_size == 1 and layout.cut == "cost"


def fits(num_gpus: int, tokens_per_second: float = 0.0) -> bool:
    try:
        best = search(WIDE, num_gpus, TWO_A_NODE, is_plain).best
    except ConfigError:
        return False
    return bool(best) and best[0].time.tokens_per_second >= tokens_per_second


def test_fewer_ranks_than_the_fewest_do_not_fit() -> None:
    every = [n for n in (1, 2, 4, 6, 8) if fits(n)]
    fewest, _ = choose(WIDE, 8, TWO_A_NODE, Objective("gpus"), is_plain)
    assert fewest.num_gpus == every[0] > 1
    fastest = choose(WIDE, 8, TWO_A_NODE, Objective(), is_plain)[0].best[0].time.tokens_per_second
    fewest, _ = choose(WIDE, 8, TWO_A_NODE, Objective("gpus", tokens_per_second=0.9 * fastest), is_plain)
    assert fewest.num_gpus == next(n for n in every if fits(n, 0.9 * fastest))


# 5 layers, 6 heads and 12 sequences: 6 accelerators are faster than 8, and some numbers have no layout
UNEVEN = small(num_layers=5, num_attention_heads=6, hidden_size=384, vocab_size=2048, global_batch_size=12)
NUMBERS = (1, 2, 4, 6, 8, 10, 12, 14)


@functools.cache
def reached(num_gpus: int, gib: float) -> float:
    """Return the tokens/s of the best layout by a whole search, 0 if nothing fits."""
    try:
        best = search(UNEVEN, num_gpus, two_a_node(gib), is_plain).best
    except ConfigError:
        return 0.0
    return best[0].time.tokens_per_second if best else 0.0


@given(st.sampled_from([2.0, 0.15, 0.08]), st.floats(0.05, 1.1), st.sampled_from(NUMBERS))
@settings(max_examples=25, deadline=None)
def test_the_fewest_accelerators_equal_a_search_of_every_number(gib: float, share: float, most: int) -> None:
    every = {number: reached(number, gib) for number in NUMBERS}
    goal = share * max(every.values())
    enough = [number for number in NUMBERS if number <= most and every[number] >= goal]
    objective = Objective("gpus", tokens_per_second=goal)
    if enough:
        assert choose(UNEVEN, most, two_a_node(gib), objective, is_plain)[0].num_gpus == enough[0]
    else:
        with pytest.raises(ConfigError, match="no layout on up to"):
            choose(UNEVEN, most, two_a_node(gib), objective, is_plain)


def test_more_accelerators_can_be_slower() -> None:
    rates = [reached(number, 0.15) for number in NUMBERS]
    assert rates != sorted(rates)


def test_the_cheapest_tokens_cost_what_their_accelerators_do() -> None:
    cheapest, tried = choose(WIDE, 8, TWO_A_NODE, Objective("cost", price_per_hour=3.6), is_plain)
    assert [found.num_gpus for found in tried] == [4, 8]
    assert cheapest.cost(3.6) == min(found.cost(3.6) or 0.0 for found in tried)
    rate = cheapest.best[0].time.tokens_per_second
    assert cheapest.cost(3.6) == pytest.approx(cheapest.num_gpus * 3.6 / 3600 / rate * 1e9)


def test_an_objective_that_no_number_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 h100 .*1,000,000,000,000,000 tokens/s"):
        choose(WIDE, 8, TWO_A_NODE, Objective("gpus", tokens_per_second=1e15), is_plain)


EXPERTS = {"num_experts": 4, "add_bias_linear": False, "global_batch_size": 8, "moe_ffn_hidden_size": 512}


@pytest.mark.parametrize("per_node", [2, 4])
def test_the_best_layout_with_experts_equals_an_exhaustive_search(per_node: int) -> None:
    config, every = small(**EXPERTS, num_layers=2), []
    for tp, pp, (schedule, chunks), size, recompute, sharded, cut, ep, etp in itertools.product(
        (1, 2, 4),
        (1, 2),
        FAMILIES[:2] + FAMILIES[4:6],
        (1, 2, 4),
        RECOMPUTES[::4],
        BOTH,
        ("cost", "even"),
        (1, 2, 4),
        (1, 2, 4),
    ):
        if tp * pp > 4 or tp % etp or 4 // pp % (ep * etp):
            continue
        try:
            layout = Layout(tp, pp, chunks, schedule, size, recompute, tp > 1, sharded, cut, ep, etp)
            every.append(predict(config, layout, 4, dataclasses.replace(H100, ranks_per_node=per_node)))
        except ConfigError:
            continue
    peaks = sorted(each.peak_bytes for each in every)
    for usable in (peaks[-1], peaks[len(peaks) // 10]):
        memory = int(usable / H100.memory_share) + 1
        hardware = dataclasses.replace(H100, ranks_per_node=per_node, memory_bytes=memory)
        fitting = [each for each in every if each.peak_bytes <= hardware.usable_bytes]
        best = search(config, 4, hardware, lambda each: each.recompute in RECOMPUTES[::4] and not each.overlap).best
        assert best[0].time.seconds == pytest.approx(min(each.time.seconds for each in fitting), rel=1e-3)
        assert all(each.layout.etp is not None for each in best)


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_closed_forms_are_at_most_the_simulated_seconds(experts: dict[str, object]) -> None:
    """So that a search can end at the first one that is above the best that were simulated."""
    shares = search(small(**experts), 4, H100, lambda layout: layout.pp > 1 and layout.micro_batch_size == 1).shares
    assert len(shares) >= 10 and max(shares) <= 1 + 1e-9


def test_layouts_of_experts_divide_experts_and_ranks_and_are_accepted_by_training() -> None:
    config = small(**EXPERTS)
    tried = [layout for layout in layouts(config, 8, H100) if layout.tp <= 2 and layout.micro_batch_size == 1]
    grids = {(layout.tp, layout.pp, layout.ep, layout.etp) for layout in tried}
    assert {(1, 1, ep, 1) for ep in (1, 2, 4)} | {(2, 1, 4, 1), (2, 1, 2, 2)} <= grids
    assert all(layout.sequence_parallel == (layout.tp > 1) for layout in tried)
    for tp, pp, ep, etp in grids:
        layout = Layout(tp, pp, 1, "1f1b", 1, RecomputeConfig(), tp > 1, True, "cost", ep, etp)
        topology = resolve(layout.applied_to(config), 8, 8).topology
        assert (topology.tp, topology.pp, topology.ep, topology.etp) == (tp, pp, ep, etp)


def test_ep_is_kept_inside_a_node_where_the_network_is_slow() -> None:
    config = small(**{**EXPERTS, "num_experts": 8, "global_batch_size": 16})
    slow = dataclasses.replace(H100, ranks_per_node=4, network=Link(1e8, 1e-5))
    best = search(config, 8, slow, lambda layout: layout.ep > 1).best[0]
    assert not best.plan.topology.crosses_nodes("ep")
    assert f"etp {best.layout.etp} x ep {best.layout.ep}" in best.layout.grid


LONG = {"seq_length": 32768, "num_layers": 2, "attention_dropout": 0.0, "num_query_groups": 2, "global_batch_size": 4}
CONTEXTS = (
    NO_CONTEXT,
    *(Context(cp, (kind,)) for cp in (2, 4) for kind in ("p2p", "a2a")),
    Context(4, ("a2a+p2p",), (2, 2)),
)


@pytest.mark.parametrize("per_node", [2, 4])
def test_the_best_layout_of_long_sequences_equals_an_exhaustive_search(per_node: int) -> None:
    config, every = small(**LONG), []
    slow = dataclasses.replace(H100, ranks_per_node=per_node, network=Link(2e9, 1e-5))
    for context, tp, pp, recompute, sliced, sharded in itertools.product(
        CONTEXTS, (1, 2, 4), (1, 2), RECOMPUTES[::2], BOTH, BOTH
    ):
        if context.ranks * tp * pp > 4 or tp > per_node or (tp == 1 and sliced):
            continue
        layout = Layout(tp, pp, 1, "1f1b", 1, recompute, sliced, sharded, context=context)
        with suppress(ConfigError):
            every.append(predict(config, layout, 4, slow))
    peaks = sorted(each.peak_bytes for each in every)
    for usable in (peaks[-1], peaks[len(peaks) // 10]):
        hardware = dataclasses.replace(slow, memory_bytes=int(usable / H100.memory_share) + 1)
        fitting = [each for each in every if each.peak_bytes <= hardware.usable_bytes]
        best = search(
            config,
            4,
            hardware,
            lambda layout: (
                layout.schedule == "1f1b"
                and layout.micro_batch_size == 1
                and layout.recompute in RECOMPUTES[::2]
                and not layout.sharding
            ),
        ).best
        assert best[0].time.seconds == pytest.approx(min(each.time.seconds for each in fitting), rel=1e-3)
        assert best[0].layout.context in CONTEXTS


# a batch of one sequence, of one head: without cp all 4 ranks are of a pipeline, which only slices fill
SLICED = {"seq_length": 32768, "hidden_dropout": 0.0, "attention_dropout": 0.0, "global_batch_size": 1, "num_layers": 6}


@pytest.mark.parametrize("own", [1, 3])
def test_the_best_layout_with_slices_equals_an_exhaustive_search(own: int) -> None:
    config, every = small(**SLICED, num_attention_heads=1, pipe_sp_splits=own), []
    for (schedule, chunks), slices, recompute, cut in itertools.product(
        FAMILIES, {1, 2, 4, own}, RECOMPUTES[::2], ("cost", "even", "ends")
    ):
        with suppress(ConfigError):
            layout = Layout(1, 4, chunks, schedule, 1, recompute, False, False, cut, slices=slices)
            every.append(predict(config, layout, 4, H100))
    peaks = sorted(each.peak_bytes for each in every)
    for usable in (peaks[-1], peaks[len(peaks) // 10]):
        hardware = dataclasses.replace(H100, memory_bytes=int(usable / H100.memory_share) + 1)
        fitting = [each for each in every if each.peak_bytes <= hardware.usable_bytes]
        found = search(
            config, 4, hardware, lambda layout: layout.context.ranks == 1 and layout.recompute in RECOMPUTES[::2]
        )
        best = found.best[0]
        assert best.time.seconds == pytest.approx(min(each.time.seconds for each in fitting), rel=1e-3)
        assert best.layout.slices == best.plan.num_slices > 1 and f"slices {best.layout.slices}" in str(best.layout)
        (words,) = (line for line in reasons(found, hardware) if line.startswith("slices "))
        assert "with whole sequences in the pipeline a step would take" in words


def slices_of(config: Config) -> dict[tuple[str, int, int, bool], set[int]]:
    """Return the slices that are compared for each schedule, cp and microbatch, and for sharded weights, with pp 2."""
    found: dict[tuple[str, int, int, bool], set[int]] = {}
    for layout in layouts(config, 8, H100):
        if layout.pp == 2:
            key = layout.schedule, layout.context.ranks, layout.micro_batch_size, bool(layout.sharding)
            found.setdefault(key, set()).add(layout.slices)
        assert layout.pp > 1 or layout.slices == 1
    return found


def test_slices_are_tried_where_they_have_enough_tokens_and_the_rules_allow_them() -> None:
    long = {"seq_length": 4 * LEAST_TOKENS, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    found = slices_of(small(**long))
    assert found["1f1b", 1, 1, False] == found["zb-v", 1, 1, False] == {1, 2, 4}
    assert found["v-half", 1, 1, False] == found["1f1b", 1, 2, False] == found["1f1b", 2, 1, False] == {1}
    assert found["interleaved", 1, 1, True] == {1}
    assert slices_of(small(**long | {"seq_length": 2 * LEAST_TOKENS}))["1f1b", 1, 1, False] == {1, 2}
    assert slices_of(small(**long | {"attention_dropout": 0.1}))["1f1b", 1, 1, False] == {1}
    own = slices_of(small(**long | {"seq_length": 128, "pipe_sp_splits": 5}))
    assert own["1f1b", 1, 1, False] == own["interleaved", 1, 2, False] == {1, 5}
    assert own["v-min", 1, 1, False] == {1}


def contexts(config: Config, world_size: int = 8, hardware: Hardware = H100) -> set[Context]:
    """Return the kinds of context parallelism that are compared with tp 1."""
    return {layout.context for layout in layouts(config, world_size, hardware) if layout.tp == 1}


def test_context_parallelism_is_tried_where_a_rank_keeps_enough_tokens_and_heads_divide() -> None:
    assert contexts(small()) == {NO_CONTEXT}
    p2p, a2a = (Context(2, (kind,)) for kind in ("p2p", "a2a"))
    assert contexts(small(seq_length=2 * LEAST_TOKENS)) == {NO_CONTEXT, p2p, a2a}
    assert contexts(small(seq_length=2 * LEAST_TOKENS, num_attention_heads=1)) == {NO_CONTEXT, p2p}
    assert contexts(small(seq_length=2 * LEAST_TOKENS + 2)) == {NO_CONTEXT}  # not a multiple of 4
    two_levels = Context(4, ("a2a+p2p",), (2, 2))
    long = small(seq_length=4 * LEAST_TOKENS)
    assert two_levels not in contexts(long)
    assert two_levels in contexts(long, hardware=dataclasses.replace(H100, ranks_per_node=2))


def test_the_configured_context_parallelism_is_tried_for_any_length() -> None:
    own = Context(4, ("all_gather",))
    found = contexts(small(context_parallel_size=4, cp_comm_type=("all_gather",)))
    assert found == {NO_CONTEXT, Context(4), Context(4, ("a2a",)), own}


def test_layouts_with_context_parallelism_are_accepted_by_training_and_explained() -> None:
    config = small(**LONG)
    found = search(config, 4, with_memory(3.0), lambda layout: layout.context.ranks > 1)
    winner = found.best[0]
    topology = resolve(winner.layout.applied_to(config), 4, H100.ranks_per_node).topology
    assert topology.cp == winner.layout.context.ranks > 1
    assert str(winner.layout.context) in winner.layout.grid
    assert any(reason.startswith("cp ") for reason in reasons(found, H100))


@pytest.mark.parametrize("share", [1.0, 0.4], ids=["all fit", "few fit"])
def test_the_ten_best_with_overlap_equal_those_of_trying_every_layout(share: float) -> None:
    """Of layouts that differ in recompute or the sharing between replicas alone, the fastest that fits counts."""
    config = small(**{**EXPERTS, "num_experts": 8, "num_layers": 4, "moe_router_topk": 4, "global_batch_size": 16})
    network = dataclasses.replace(H100.network, bytes_per_second=5e9)
    hardware = dataclasses.replace(H100, ranks_per_node=2, network=network)

    def is_tried(layout: Layout) -> bool:
        has_size = layout.cut == "cost" and layout.micro_batch_size == 1 and layout.tp == 1 and layout.pp < 4
        return has_size and layout.recompute in (RECOMPUTES[0], RECOMPUTES[4]) and not layout.sharding

    every = []
    for layout in filter(is_tried, layouts(config, 8, hardware)):
        with suppress(ConfigError):
            every.append(predict(config, layout, 8, hardware))
    assert {(each.layout.overlap, each.layout.flex) for each in every} == set(itertools.product(BOTH, BOTH))
    assert {"dualpipe", "dualpipe-v"} <= {each.layout.schedule for each in every}
    usable = sorted(each.peak_bytes for each in every)[int(share * (len(every) - 1))]
    hardware = dataclasses.replace(hardware, memory_bytes=int(usable / hardware.memory_share) + 1)
    fastest: dict[Layout, float] = {}
    for each in every:
        if each.peak_bytes <= hardware.usable_bytes:
            alike = family(each.layout)
            fastest[alike] = min(each.time.seconds, fastest.get(alike, math.inf))
    best = search(config, 8, hardware, is_tried).best
    assert [each.time.seconds for each in best] == pytest.approx(sorted(fastest.values())[:10], rel=2e-3)
    assert any(each.layout.overlap for each in best)


def test_groups_hold_every_layout_once() -> None:
    config = small(**EXPERTS)
    every = list(layouts(config, 8, two_a_node(1.0)))
    assert len(set(every)) == len(every) == sum(group.size for group in groups(config, 8, two_a_node(1.0)))


def test_every_field_of_a_layout_belongs_to_one_aspect() -> None:
    fields = [name for names in ASPECTS.values() for name in names]
    assert sorted(fields) == sorted(field.name for field in dataclasses.fields(Layout))
    layout = Layout(1, 2, 1, "1f1b", 1, RecomputeConfig())
    assert difference(layout, dataclasses.replace(layout, pp=4, chunks=2)) == "the pipeline"
    assert difference(layout, dataclasses.replace(layout, pp=4, tp=2)) == "several"


@pytest.mark.parametrize(
    ("experts", "is_wanted"),
    [
        ({}, lambda layout: layout.instances == 2),
        ({}, lambda layout: layout.sharding == "optim_grads"),
        (EXPERTS, lambda layout: layout.sharding == SHARDED_PARAMS),
        (EXPERTS, lambda layout: layout.instances == 2 and not layout.sharding),
        ({}, lambda layout: layout.instances == 1),
    ],
    ids=["instances", "sharded gradients", "experts with sharded weights", "experts with instances", "one instance"],
)
def test_the_best_of_each_sharing_equals_trying_every_layout(
    experts: dict[str, object], is_wanted: Callable[[Layout], bool]
) -> None:
    """Replicas exchange over a slow network, so that what they exchange decides."""
    config = small(**{**experts, "num_layers": 4, "global_batch_size": 8})
    network = dataclasses.replace(H100.network, bytes_per_second=2e9)
    hardware = dataclasses.replace(H100, ranks_per_node=2, network=network)

    def is_tried(layout: Layout) -> bool:
        has_size = layout.cut == "cost" and layout.micro_batch_size == 1 and layout.tp < 4 and layout.chunks < 3
        return has_size and is_wanted(layout) and layout.recompute in (RECOMPUTES[0], RECOMPUTES[6])

    every = []
    for layout in filter(is_tried, layouts(config, 4, hardware)):
        with suppress(ConfigError):
            every.append(predict(config, layout, 4, hardware))
    for share in (1.0, 0.3):
        usable = sorted(each.peak_bytes for each in every)[int(share * (len(every) - 1))]
        here = dataclasses.replace(hardware, memory_bytes=int(usable / hardware.memory_share) + 1)
        fastest = min(each.time.seconds for each in every if each.peak_bytes <= here.usable_bytes)
        assert search(config, 4, here, is_tried).best[0].time.seconds == pytest.approx(fastest, rel=1e-6)

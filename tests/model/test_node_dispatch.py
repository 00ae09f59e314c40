"""Dispatch over two levels of ep: index lists beside plain loops, rows beside those of a plain all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.comm.groups import ExpertGroups
from megapipe.model.dispatch import Routes
from megapipe.model.node_dispatch import NodeRoutes, entries_of, pairs_of, passed_on, sums_of_rows
from megapipe.model.permutation import permuted, rows_by_expert
from megapipe.topology import Topology
from tests.comm.ranks import groups_of
from tests.harness import RankPool


def routed(chosen: Tensor, num_experts: int, dropped: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts of rows for each expert, the slots [t, k] and the order of the rows, by a sort."""
    rows = chosen.flatten() if dropped is None else torch.where(dropped.flatten(), num_experts, chosen.flatten())
    sorted_rows = rows.argsort(stable=True)
    counts = torch.bincount(rows, minlength=num_experts + 1)[:num_experts]
    slots = torch.empty_like(sorted_rows).scatter_(0, sorted_rows, torch.arange(rows.numel()))
    return counts, slots.view_as(chosen), sorted_rows[: int(counts.sum())]


def draw_chosen(seed: int, tokens: int, topk: int, num_experts: int) -> Tensor:
    """Return topk different experts of each token, more often those of small numbers."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator) + torch.linspace(1, 0, num_experts)
    return scores.argsort(dim=1, descending=True)[:, :topk].contiguous()


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int, int]:
    """Draw the choices of some tokens, what is dropped of them, and nodes, places and experts of a place."""
    nodes, places, held = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts = nodes * places * held
    topk, tokens, seed = draw(st.integers(1, min(num_experts, 8))), draw(st.integers(1, 9)), draw(st.integers(0, 99))
    chosen = draw_chosen(seed, tokens, topk, num_experts)
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    dropped = torch.rand(tokens, topk, generator=torch.Generator().manual_seed(seed + 1)) < share
    return chosen, dropped, nodes, places, held


@given(choices())
@settings(max_examples=150)
def test_pairs_and_their_rows_equal_a_plain_loop(
    drawn: tuple[Tensor, Tensor, int, int, int],
) -> None:
    chosen, dropped, nodes, places, held = drawn
    of_node = places * held
    counts, slots, _ = routed(chosen, nodes * of_node, dropped)
    node_ends = counts.view(nodes, -1).sum(1).cumsum(0)
    pairs, tokens = pairs_of(slots, node_ends)
    expected: list[tuple[int, list[int]]] = []
    numbers = []
    for node in range(nodes):
        begin = len(expected)
        for token, experts in enumerate(chosen.tolist()):
            rows = [
                int(slots[token, j]) - int(counts[: node * of_node].sum())
                if expert // of_node == node and not dropped[token, j]
                else -1
                for j, expert in enumerate(experts)
            ]
            if any(row >= 0 for row in rows):
                expected.append((token, rows))
        numbers.append(len(expected) - begin)
    assert pairs.tolist() == numbers
    tokens = tokens[: len(expected)]
    first, entries = entries_of(slots, tokens, node_ends, pairs)
    assert tokens.tolist() == [token for token, _ in expected]
    assert entries.tolist() == [rows for _, rows in expected]
    lowest = [min(int(slot) for slot in slots[token]) for token, _ in expected]
    assert all(int(one) in slots[token].tolist() for one, token in zip(first, tokens.tolist(), strict=True))
    assert all(int(one) >= low for one, low in zip(first, lowest, strict=True))


@given(st.lists(st.integers(0, 3), min_size=24, max_size=24), st.permutations(range(4)))
def test_rows_of_blocks_are_reordered_as_a_plain_loop_does(sizes: list[int], dims: list[int]) -> None:
    arrived = torch.tensor(sizes).view(2, 3, 2, 2)
    numbers = iter(range(sum(sizes)))
    places = product(*map(range, arrived.shape))
    blocks = {place: list(islice(numbers, int(arrived[place]))) for place in places}
    wanted = sorted(blocks, key=lambda index: [index[dim] for dim in dims])
    order, back = rows_by_expert(torch.arange(sum(sizes)), arrived, tuple(dims))
    assert order.tolist() == [row for index in wanted for row in blocks[index]]
    assert back[order].tolist() == order[back].tolist() == list(range(sum(sizes)))


@given(choices(), st.integers(0, 99))
@settings(max_examples=100)
def test_the_rank_between_passes_on_every_row_once(drawn: tuple[Tensor, Tensor, int, int, int], seed: int) -> None:
    """Every node sends to node 0, with choices of its own."""
    first, _, nodes, places, held = drawn
    num_experts, of_node = nodes * places * held, places * held
    sent: list[tuple[Tensor, Tensor]] = []
    tables, numbers, begin = [], [], 0
    expected_pairs: dict[tuple[int, ...], int] = {}  # (place, node, expert, row) -> pair, as they are sent
    for node in range(nodes):
        chosen = draw_chosen(seed + node, len(first), first.shape[1], num_experts)
        counts, slots, _ = routed(chosen, num_experts)
        node_ends = counts.view(nodes, -1).sum(1).cumsum(0)
        pairs, tokens = pairs_of(slots, node_ends)
        _, entries = entries_of(slots, tokens[: int(pairs.sum())], node_ends, pairs)
        own = entries[: int(pairs[0])]
        for pair, (token, line) in enumerate(zip(tokens.tolist(), own.tolist(), strict=False)):
            for j, row in enumerate(line):
                if row >= 0:
                    expert = int(chosen[token, j])
                    expected_pairs[expert // held, node, expert, row] = begin + pair
        begin += len(own)
        sent.append((own, slots))
        tables.append(counts[:of_node].view(places, held))
        numbers.append(len(own))
    rows = sorted(expected_pairs)
    rows_from = torch.stack(tables)
    expand, arrange, restore, sums = passed_on(
        torch.cat([own for own, _ in sent]), torch.tensor(numbers), rows_from, int(rows_from.sum())
    )
    assert expand.tolist() == [expected_pairs[row] for row in rows]
    by_source = sorted(range(len(rows)), key=lambda at: (rows[at][1], *rows[at][2:]))
    assert restore.tolist() == by_source
    assert arrange[restore].tolist() == list(range(len(rows)))
    of_pair: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        of_pair.setdefault(expected_pairs[row], []).append(at)
    assert [sorted(x for x in line if x < len(rows)) for line in sums.tolist()] == [
        of_pair[pair] for pair in range(len(sums))
    ]


def test_sums_in_a_node_are_added_in_fp32_and_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    numbers = torch.tensor([[0, 1, 2, 3], [4, 1, 4, 4]])
    assert sums_of_rows(rows, numbers).tolist() == [[260.0], [1.0]]  # 256 + 1 == 256 in bf16


def moved(rank: int, world_size: int, per_node: int, options: dict[str, Any]) -> dict[str, Any]:
    """Send rows by both dispatchers, forward and back, and return what arrives and what returns."""
    etp, held, topk, tokens = options["etp"], options["held"], options["topk"], options["tokens"]
    ep = world_size // etp
    topology = Topology(dp=world_size, ep=ep, expert_tp=etp, ranks_per_node=per_node, divides_ep=True)
    all_groups = groups_of(rank, topology)
    groups = ExpertGroups(all_groups.ep, all_groups.etp, places=all_groups.ep_places, nodes=all_groups.ep_nodes)
    assert groups.has_levels and groups.places.size * groups.nodes.size == ep
    num_experts = ep * held
    chosen = draw_chosen(rank, tokens + rank % 2, topk, num_experts)
    generator = torch.Generator().manual_seed(rank)
    dropped = torch.rand(chosen.shape, generator=generator) < options["dropped"]
    counts, slots, order = routed(chosen, num_experts, dropped)
    x, gradient = (torch.randn(len(chosen), 3, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = torch.rand(len(order), dtype=torch.float64, generator=generator)
    plain = Routes.of(counts, len(order), groups)
    assert plain.arrived is not None
    there, back = rows_by_expert(torch.arange(sum(plain.gathered)), plain.arrived)
    kinds = {
        "plain": Routes(
            plain.groups, plain.expert_rows, plain.ends, plain.sent, plain.received, plain.gathered, there, back
        ),
        "nodes": NodeRoutes.of_slots(counts, slots, groups),
        "sums": NodeRoutes.of_slots(counts, slots, groups, adds_in_node=True),
    }
    found: dict[str, Any] = {}
    for name, routes in kinds.items():
        tokens_in, weights_in = x.clone().requires_grad_(), weights.clone().requires_grad_()
        dispatched = routes.dispatch(weights_in, tokens_in.index_select(0, order // topk))
        assert routes.order is not None and routes.back is not None
        of_rows, rows = permuted(routes.order, routes.back, *map(routes.of_all, dispatched))
        (results,) = permuted(routes.back, routes.order, torch.tanh(rows) * of_rows[:, None])
        combined = routes.combine(routes.of_own(results))
        padded = torch.cat([combined, combined.new_zeros(1, 3)])
        output = padded[slots.clamp(max=len(order))].sum(1)
        output.backward(gradient)
        found[name] = [rows, of_rows, output, tokens_in.grad, weights_in.grad, routes.ends, routes.expert_rows]
    return found


LEVELS = {
    "2x2": (4, 2, 1),
    "2x4": (8, 4, 1),
    "4x2": (8, 2, 1),
    "2x2-etp2": (8, 4, 2),
}
CASES = {
    "k1": {"topk": 1, "held": 2, "tokens": 5, "dropped": 0.0},
    "k3": {"topk": 3, "held": 1, "tokens": 7, "dropped": 0.0},
    "k4-dropped": {"topk": 4, "held": 2, "tokens": 6, "dropped": 0.4},
    "all-dropped": {"topk": 2, "held": 1, "tokens": 3, "dropped": 1.1},
    "k8": {"topk": 8, "held": 3, "tokens": 9, "dropped": 0.1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("levels", LEVELS)
def test_rows_arrive_and_return_as_by_one_all_to_all(
    levels: str, case: str, rank_pools: Callable[[int], RankPool]
) -> None:
    world_size, per_node, etp = LEVELS[levels]
    for found in rank_pools(world_size).run(moved, per_node, CASES[case] | {"etp": etp}):
        for one, other in zip(found["plain"], found["nodes"], strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for one, other in zip(found["plain"], found["sums"], strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

"""Real steps send exactly the planned bytes over tp, pp, replicas and the embedding group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe.assembly.microbatches import Keys
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm import collectives
from megapipe.comm.channels import NUMBER_BITS, Channel
from megapipe.comm.groups import Group, build_process_groups
from megapipe.model import dispatch
from megapipe.model.dispatch import Routes
from megapipe.model.microbatch import Microbatch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.traffic import step_bytes
from megapipe.train.stream import train_step
from tests.assembly.plans import EXPERTS, LATENT, SP2, ZERO1, grids, make_plan
from tests.harness import RankPool
from tests.model.grids import with_ahead

GRIDS = grids("traffic")
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
HIDDEN = 16


def sent(rank: int, world_size: int, changes: dict[str, Any]) -> dict[str, float]:
    """Run a step and return the bytes handed to each group.

    Over tp only hidden states and latents count, as in the plan.
    """
    widths = {HIDDEN}
    if "multi_latent_attention" in changes:
        widths |= {LATENT["q_lora_rank"], LATENT["kv_lora_rank"], LATENT["qk_pos_emb_head_dim"]}
    plan = make_plan(world_size, "fp32", **changes)
    runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))
    found: Counter[str] = Counter()
    run, post = collectives._run, Channel._post

    def counted(name: str, group: Group, tensors: tuple[Tensor, ...], *rest: Any) -> Any:
        whole = max(tensors, key=Tensor.numel, default=None)
        if (
            whole is not None
            and name in PASSES
            and (group.name != "tp" or (whole.ndim == 3 and whole.shape[-1] in widths))
        ):
            found[group.name] += PASSES[name] * whole.nbytes * (group.size - 1) / group.size  # type: ignore[assignment]
        return run(name, group, tensors, *rest)

    def counted_post(channel: Channel, tensor: Tensor, tag: int) -> Any:
        is_header = tag >> NUMBER_BITS & 1
        found["pp"] += tensor.nbytes if channel.sends and not is_header else 0
        return post(channel, tensor, tag)

    count = plan.batch.full // plan.batch.samples_per_microbatch
    keys = Keys(1, 2, runtime.coordinates.dp_rank, plan.topology.dp)
    tokens = torch.randint(29, (count, 2, 8), generator=torch.Generator().manual_seed(rank))
    microbatches = [Microbatch(each, labels=each.clone(), dropout_key=keys.of(k)) for k, each in enumerate(tokens)]
    microbatches = [with_ahead(each, runtime.num_ahead) for each in microbatches]
    with mock.patch.object(collectives, "_run", counted), mock.patch.object(Channel, "_post", counted_post):
        train_step(runtime).run(microbatches, Rates(1e-2, 0.0))
        runtime.stores.finish_weights()
    return dict(found)


@pytest.mark.parametrize("name", GRIDS)
def test_a_step_sends_the_bytes_in_the_plan(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, changes = GRIDS[name]
    plan = make_plan(world_size, "fp32", **changes)
    for rank, real in enumerate(rank_pools(world_size).run(sent, changes)):
        planned = step_bytes(plan, plan.topology.coordinates(rank).pp_rank)
        assert {group: real.get(group, 0) for group in planned} == planned, (rank, real)


ROUTED: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep4_zero1": (4, ZERO1 | {"expert_model_parallel_size": 4}),
    "etp2_of_tp2": (2, SP2),
    "ep2_etp2_of_dp4": (4, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
}


def routed(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[list[list[int]], dict[str, float]]:
    """Run a step without balance; return the rows for each expert in every forward, and the bytes really sent."""
    plan = make_plan(world_size, "fp32", **changes)
    runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))
    counts: list[list[int]] = []
    found: Counter[str] = Counter()
    of, exchange, gather = Routes.of, collectives.all_to_all, collectives.all_gather

    def recorded(rows: Tensor, num_rows: int, groups: Any) -> Any:
        counts.append(rows.tolist())
        return of(rows, num_rows, groups)

    def exchanged(output: Tensor, tensor: Tensor, received: Any, sent: Any, group: Group, **options: Any) -> Any:
        row = tensor[:1].nbytes if len(tensor) else 0
        found[group.name] += row * (sum(sent) - sent[group.rank])  # type: ignore[assignment]
        return exchange(output, tensor, received, sent, group, **options)

    def gathered(output: Tensor, tensor: Tensor, group: Group, **options: Any) -> Any:
        found[group.name] += (group.size - 1) * tensor.nbytes
        return gather(output, tensor, group, **options)

    tokens = torch.randint(29, (2, 2, 8), generator=torch.Generator().manual_seed(rank))
    keys = Keys(1, 2, runtime.coordinates.dp_rank, plan.topology.dp)
    count = plan.batch.full // plan.batch.samples_per_microbatch
    microbatches = [Microbatch(tokens[k % 2], labels=tokens[k % 2], dropout_key=keys.of(k)) for k in range(count)]
    with (
        mock.patch.object(Routes, "of", recorded),
        mock.patch.object(dispatch, "all_to_all", exchanged),
        mock.patch.object(dispatch, "all_gather", gathered),
    ):
        train_step(runtime).run(microbatches, Rates(1e-2, 0.0))
    return counts, dict(found)


@pytest.mark.parametrize("name", ROUTED)
def test_an_uneven_step_sends_the_bytes_of_its_routing(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, changes = ROUTED[name]
    changes = EXPERTS | {"moe_router_force_load_balancing": False} | changes
    plan, found = make_plan(world_size, "fp32", **changes), rank_pools(world_size).run(routed, changes)
    topology, experts, row = plan.topology, EXPERTS["num_experts"], 4 * HIDDEN
    held = experts // topology.ep
    planned = step_bytes(plan, 0)
    for rank, (counts, real) in enumerate(found):
        ep_group, etp_group = topology.group_of("ep", rank), topology.group_of("etp", rank)

        def sent(source: int, target: int, call: int) -> int:
            """Return the rows of rank `source` for the experts of `target`, of the same etp_rank."""
            first = topology.group_of("ep", target).index(target) * held
            return sum(found[source][0][call][first : first + held])

        def owned(owner: int, call: int) -> int:
            """Return the rows of a rank after its all-to-all."""
            return sum(sent(source, owner, call) for source in topology.group_of("ep", owner))

        over_ep = over_etp = 0
        for call in range(len(counts)):
            others = [other for other in ep_group if other != rank]
            there_and_back = sum(sent(rank, other, call) + sent(other, rank, call) for other in others)
            # forward and backward, rows both ways and the weights one way
            over_ep += (2 * row + 4) * there_and_back + 8 * held * len(others)
            partners = [other for other in etp_group if other != rank]
            shared = owned(rank, call) * len(partners) + sum(owned(other, call) for other in partners)
            over_etp += (2 * row + 4) * shared + 8 * experts * len(partners)
        assert (real.get("ep", 0), real.get("etp", 0)) == (over_ep, over_etp)
    if topology.ep > 1:
        assert len({real["ep"] for _, real in found} | {planned["ep"]}) > 1  # the routing was not balanced

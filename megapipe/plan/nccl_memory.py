"""A model of the device memory that NCCL's communicators hold: a part of a plan's memory (`plan.memory`).

Not measured. From NCCL's sources (github.com/NVIDIA/nccl: src/init.cc, src/transport/p2p.cc, src/transport/net.cc) with
their default sizes: a channel from one GPU to another of its node has a buffer of each protocol, 4 MiB (simple),
4.7 MiB (LL128) and 0.5 MiB (LL), on the receiver and a block of 2 MiB on the sender; both are multiples of 2 MiB, so
10 and 2 MiB. Over the network each end of a channel of a collective has 10 MiB, while the messages of a communicator
share 16 slots of 128 KiB a channel and direction. The numbers of channels are assumptions for nodes of 8 GPUs with
NVLink, where a peer has up to 32 (github.com/NVIDIA/nccl/issues/1781); others use fewer. An all-to-all of 8 such GPUs
takes 2.8 GB here, 3.3 GB in a user's measurement (github.com/NVIDIA/nccl/issues/1685).

    ring       collectives: one channel end to the next rank, one from the one before, for every channel
    exchange   all-to-alls: such ends to and from every rank of the node
    messages   of a pipeline's route: a sender's or a receiver's ends; of a context-parallel ring: both
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megapipe.plan.run_plan import RunPlan

MIB = 1 << 20
SENDER, RECEIVER = 2 * MIB, 10 * MIB  # of a channel inside a node
NETWORK_END = 10 * MIB  # of a channel of a ring over the network
SHARED = 16 * 16 * (MIB // 8)  # of messages over the network in one direction: 16 channels, 16 slots of 128 KiB
RING_CHANNELS, RING_CHANNELS_OVER_NETWORK = 24, 16
PEER_CHANNELS, PEER_CHANNELS_OVER_NETWORK = 32, 2  # to a GPU of the node, in a communicator inside it or across nodes
CHANNELS_IN_NODE = 4  # of a message between stages, a power of two; docs/gpu.md has what waiting receives hold
CHANNEL = SENDER + RECEIVER
# bytes of a communicator: True where it crosses nodes
RING = {False: RING_CHANNELS * CHANNEL, True: 2 * RING_CHANNELS_OVER_NETWORK * NETWORK_END}
BOTH_WAYS = {False: PEER_CHANNELS * CHANNEL, True: 2 * SHARED}  # messages of a context-parallel ring
ROUTE = {False: CHANNELS_IN_NODE * CHANNEL, True: 2 * SHARED}  # activations one way, gradients the other


def nccl_bytes(plan: RunPlan, pp_rank: int) -> int:
    """Return the bytes of all communicators of such a rank; 0 on CPUs and over gloo."""
    config, topology = plan.config, plan.topology
    if config.training.device == "cpu" or config.parallel.distributed_backend == "gloo" or topology.world_size == 1:
        return 0
    rank = topology.group_of("pp", 0)[pp_rank]
    rings = sum(RING[crosses] for crosses, _ in _groups(plan, rank, *_rings(plan)))
    exchanges = sum(_exchange(plan, rank, group) for group in _groups(plan, rank, *_exchanges(plan)))
    in_ring = sum(BOTH_WAYS[crosses] for crosses, _ in _groups(plan, rank, *_messages(plan)))
    return rings + exchanges + in_ring + _pipeline(plan, rank)


def _groups(plan: RunPlan, rank: int, *names: str) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Yield (crosses nodes, ranks) of this rank's groups of these kinds that have a communicator."""
    for ranks in (plan.topology.group_of(name, rank) for name in names):
        if len(ranks) > 1:
            yield plan.topology.node_of(min(ranks)) != plan.topology.node_of(max(ranks)), ranks


def _rings(plan: RunPlan) -> list[str]:
    """Return the kinds of groups that run collectives, once for each communicator."""
    topology = plan.topology
    names = ["world", "tp", *(["embedding"] if plan.tied_across_ranks else [])]
    for is_expert in (False, True) if plan.model.has_experts else (False,):
        shards = topology.shard_group(is_expert)
        names.append(shards)
        names += ["expert_instances" if is_expert else "instances"] if topology.sharing(is_expert)[1] > 1 else []
        names += [shards] if plan.sharding is not None and plan.sharding.gathers else []  # a second one, for weights
    names += ["etp"] if plan.model.has_experts and topology.ep > 1 else []
    return [*names, *(["cp"] if "all_gather" in plan.config.parallel.cp_comm_type else [])]


def _exchanges(plan: RunPlan) -> list[str]:
    """Return the kinds of groups that run all-to-alls."""
    kinds, t = plan.config.parallel.cp_comm_type, plan.topology
    over = ("ep",) if t.ep_inner in (1, t.ep) else ("ep_nodes", "ep_places")  # the first leaves the rank
    names = [over[0]] * (plan.parts is not None) + [*over] if plan.model.has_experts else []
    return [*names, *(["cp"] if "a2a" in kinds else []), *(["cp_a2a"] if "a2a+p2p" in kinds else [])]


def _messages(plan: RunPlan) -> list[str]:
    """Return the kinds of groups that are rings of messages."""
    kinds = plan.config.parallel.cp_comm_type
    return [*(["cp"] if "p2p" in kinds else []), *(["cp_p2p"] if "a2a+p2p" in kinds else [])]


def _exchange(plan: RunPlan, rank: int, group: tuple[bool, tuple[int, ...]]) -> int:
    crosses, ranks = group
    neighbours = sum(plan.topology.node_of(other) == plan.topology.node_of(rank) for other in ranks) - 1
    channels = PEER_CHANNELS_OVER_NETWORK if crosses else PEER_CHANNELS
    return neighbours * channels * CHANNEL + 2 * SHARED * crosses


def _pipeline(plan: RunPlan, rank: int) -> int:
    """Return the bytes of the communicators between stages: one for each route (`schedule.dependencies`)."""
    pipeline = plan.topology.group_of("pp", rank)
    pairs = {pair for rank_of_stage in plan.placement.directions for pair in pairwise(rank_of_stage)}
    routes = [(pipeline[before], pipeline[after]) for before, after in pairs if before != after]
    return sum(ROUTE[len(plan.topology.nodes_of(route)) > 1] for route in routes if rank in route)

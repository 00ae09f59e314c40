"""One check of communication on the ranks of a job, over gloo on CPUs or NCCL on GPUs.

python -m megapipe launch --nproc-per-node 2 tests/cuda/ranks.py CHECK BACKEND
"""

from __future__ import annotations

import random
import sys
import time

import torch

from megapipe.comm.bootstrap import World, shutdown, start
from megapipe.comm.channels import ChannelKey, Channels, MessageSpec
from megapipe.comm.collectives import all_reduce, barrier
from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.environment import read_environment
from megapipe.errors import CommunicationError
from megapipe.schedule.dependencies import Route
from megapipe.schedule.placement import loop
from megapipe.topology import Topology

NUM_CHUNKS, NUM_MESSAGES, NUM_ELEMENTS = 3, 4, 1 << 16
TIMEOUT_SECONDS = 5.0


def order(world: World, groups: ProcessGroups) -> None:
    """Send over ten channels of two ranks and check every element.

    Each rank mixes its four routes in an order of its own; the order within a route is one for both.
    """
    channels = Channels.build(loop(2, NUM_CHUNKS), groups.pp, world.device)
    by_route: dict[Route, list[ChannelKey]] = {}
    for key, channel in channels.items():
        by_route.setdefault(channel.route, []).extend([key] * NUM_MESSAGES)
    for keys in by_route.values():
        random.Random(0).shuffle(keys)
    routes = [route for route, keys in by_route.items() for _ in keys]
    random.Random(world.global_rank).shuffle(routes)
    todo = [by_route[route].pop() for route in routes]
    spec, number = (MessageSpec((NUM_ELEMENTS,), torch.float32),), dict.fromkeys(channels, 0)
    pending, received = [], []
    for key in todo:
        value = 100.0 * channels[key].index + number[key]
        number[key] += 1
        if channels[key].sends:
            pending.append(channels[key].send((torch.full((NUM_ELEMENTS,), value, device=world.device),)))
        else:
            received.append((value, channels[key].post_receive(spec)))
    wrong = [value for value, message in received if not bool((message.wait()[0] == value).all())]
    for message in pending:
        message.wait()
    assert not wrong, f"messages {wrong} have come with other contents"
    barrier(groups.world)
    print(f"{len(received)} messages received over {len(channels)} channels")


def time_out(world: World, groups: ProcessGroups) -> None:
    """Let rank 1 stay away from a collective. gloo raises on rank 0; NCCL's watchdog ends the process."""
    barrier(groups.world)
    if world.global_rank == 1:
        time.sleep(60)
    all_reduce(torch.ones(1, device=world.device), groups.world)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    raise AssertionError("the collective has ended without rank 1")


def sharing(num_ranks: int) -> list[str]:
    """Return the flags of `megapipe launch` with which ranks share this machine's GPUs; [] if each has its own.

    A machine without a GPU counts as one with a single GPU, so that a twin on CPUs runs the same code.
    """
    num_gpus = max(1, torch.cuda.device_count())
    fewest = next(n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and num_ranks <= n * num_gpus)
    return ["--ranks-per-gpu", str(fewest)] if fewest > 1 else []


CHECKS = {"order": order, "time_out": time_out}

if __name__ == "__main__":
    check, backend = sys.argv[1:]
    device = "cuda" if backend == "nccl" else "cpu"
    world = start(
        read_environment(), backend, TIMEOUT_SECONDS if check == "time_out" else 60.0, device, facts_of=lambda _: {}
    )
    groups = build_process_groups(
        Topology(pp=world.world_size), world.global_rank, world.backend, world.timeout_seconds
    )
    try:
        CHECKS[check](world, groups)
    except CommunicationError as error:
        print(error, file=sys.stderr, flush=True)
        shutdown(1)
    shutdown(0)

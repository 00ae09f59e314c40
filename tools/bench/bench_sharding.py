"""Time a training step of the strategies of data-parallel sharding on gloo, strategies in turn.

    python tools/bench/bench_sharding.py --dp 2 --pp 1 --num-layers 8 --units 8

Ranks are processes of this machine with one thread each. Every repeat runs one step of each strategy, so that other
work on the machine meets all of them; medians over the repeats of the slowest rank. Bytes are planned: sent in a step,
kept, and whole at most (weights, gradients, optimizer), by a rank of the first stage. First losses are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from bench_processes import BenchError, answer, free_port, num_cores, processor, spawn

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.bootstrap import start
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import make_config
from megapipe.environment import Environment
from megapipe.extras.verify.oracle import random_batches, share_of
from megapipe.optimizer.schedule import Rates
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traffic import step_bytes
from megapipe.train.step import train_step

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
KEPT = ("weights", "gradients", "optimizer")
WHOLE = ("gathered weights", "whole gradients")
OVER_REPLICAS = ("replicas", "shards", "instances")
TIMEOUT_SECONDS = 600.0
TOLERANCE = 1e-5


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, default=2, help="ranks that share out the weights")
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--chunks", type=int, default=1, help="of a pipeline rank")
    parser.add_argument("--granularity", nargs="+", default=["run"], help="microbatch, run, step: each is timed")
    parser.add_argument("--units", type=int, default=2, help="of a stage")
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args(words)


def kinds(own: argparse.Namespace) -> dict[str, RunPlan]:
    """Return the plans by name: each strategy, and where gradients are sharded each granularity."""
    plans = {}
    for strategy in STRATEGIES:
        has_granularity = strategy in ("optim_grads", "optim_grads_params")
        for granularity in own.granularity if has_granularity else ["run"]:
            options: dict[str, Any] = {"data_parallel_sharding_strategy": strategy}
            if has_granularity:
                options |= {"data_parallel_sharding_granularity": granularity}
                options |= {"data_parallel_sharding_units": own.units}
            name = f"{strategy} {granularity}" if has_granularity else strategy
            plans[name] = plan_of(own, options | {"overlap_param_gather": strategy != "no_shard"})
    return plans


def plan_of(own: argparse.Namespace, parallel: dict[str, Any]) -> RunPlan:
    """Plan a model with these options of the parallel section."""
    model = {"num_layers": own.num_layers, "hidden_size": own.hidden_size, "num_attention_heads": 8}
    model |= {"seq_length": own.seq_length, "vocab_size": 1024, "untie_embeddings_and_output_weights": True}
    model |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    parallel |= {"pipeline_model_parallel_size": own.pp, "pipeline_schedule": own.schedule}
    parallel |= {"num_virtual_stages_per_pipeline_rank": own.chunks, "overlap_grad_reduce": True}
    training = {"micro_batch_size": 1, "global_batch_size": own.microbatches * own.dp, "train_iters": 1}
    sections = {"model": model, "parallel": parallel, "training": training | {"device": "cpu"}}
    values = {f"{section}.{name}": value for section, each in sections.items() for name, value in each.items()}
    return resolve(make_config(values | {"optimizer.lr": 1e-3}), own.dp * own.pp)


def rank_main(connection: Connection, rank: int, own: argparse.Namespace, port: int) -> None:
    """Train on one rank: for each kind its first loss and the seconds of every repeat."""
    torch.set_num_threads(1)
    world = own.dp * own.pp
    local = Environment(rank, world, rank, world, 1, 0, master_addr="127.0.0.1", master_port=port, launcher="single")
    start(local, "gloo", TIMEOUT_SECONDS, "cpu", facts_of=lambda _: {})
    steps = {}
    for name, plan in kinds(own).items():
        groups = build_process_groups(plan.topology, rank, "gloo", TIMEOUT_SECONDS)
        runtime = TrainingRuntime(plan, groups, torch.device("cpu"))
        (batch,) = random_batches(plan.config, own.dp, [own.microbatches], seed=1)
        steps[name] = train_step(runtime), share_of(runtime, batch, 0), groups.world
    rates, losses = Rates(1e-3, 0.0), {}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(own.repeats + 1):
        for name, (step, microbatches, everyone) in steps.items():
            barrier(everyone)
            began = time.perf_counter()
            result = step.run(microbatches, rates)
            barrier(everyone)
            if repeat == 0:  # a warm-up, in which microbatches are read
                losses[name] = result.loss
            else:
                seconds[name].append(time.perf_counter() - began)
    connection.send((losses, seconds))


def main(words: list[str]) -> int:
    own = arguments(words)
    port, world = free_port(), own.dp * own.pp
    ranks = [spawn(rank_main, rank, own, port) for rank in range(world)]
    found = [answer(connection, f"rank {rank}", TIMEOUT_SECONDS) for rank, (_, connection) in enumerate(ranks)]
    for process, _ in ranks:
        process.join(TIMEOUT_SECONDS)
    losses = found[0][0]
    for name, loss in losses.items():
        if abs(loss - losses["no_shard"]) > TOLERANCE * abs(loss):
            raise BenchError(f"the first loss of {name} is {loss}, that of no_shard {losses['no_shard']}")
    print(f"{processor()}, {num_cores()} cores, {world} ranks of one thread, gloo; {own.repeats} repeats in turn")
    print(
        f"{own.num_layers} layers of {own.hidden_size}, dp {own.dp}, pp {own.pp}, {own.microbatches} microbatches, fp32"
    )
    print(f"{'strategy':<32}{'median':>10}{'fastest':>10}{'sent':>12}{'kept':>12}{'whole':>12}")
    for name, plan in kinds(own).items():
        slowest_rank = [max(times) for times in zip(*(each[name] for _, each in found), strict=True)]
        median, fastest = 1e3 * statistics.median(slowest_rank), 1e3 * min(slowest_rank)
        items, sent = rank_memory(plan, 0).items, step_bytes(plan, 0)
        columns = [sum(sent.get(group, 0.0) for group in OVER_REPLICAS), sum(items[item] for item in KEPT)]
        columns.append(sum(items.get(item, 0) for item in WHOLE))
        text = "".join(f"{each / 1e6:>9.1f} MB" for each in columns)
        print(f"{name:<32}{median:>7.0f} ms{fastest:>7.0f} ms{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

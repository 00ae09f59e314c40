#!/usr/bin/env python3
"""Measure an update of Muon and one of AdamW on this machine.

python tools/bench/bench_muon.py
torchrun --standalone --nproc-per-node 2 tools/bench/bench_muon.py --tensor-model-parallel-size 2 --sequence-parallel

Two runtimes of the same model, one with each rule, update in turn from random gradients: norm, update, new parameters.
Median [quartiles] over the rounds on rank 0. Other flags are those of pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.bootstrap import shutdown, start
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import build_process_groups
from megapipe.config.load import load_config
from megapipe.environment import read_environment
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve

MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --swiglu --seq-length 512 "
    "--vocab-size 8192 --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--micro-batch-size 1 --lr 1e-3 --mock-data --train-iters 1000 --use-distributed-optimizer"
)
RULES = {"adamw": [], "muon": ["--optimizer", "muon", "--muon-tp-mode", "duplicated"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="(default: 10)")
    options, flags = parser.parse_known_args()
    environment = read_environment()
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    plans = {
        rule: resolve(load_config([*MODEL.split(), *flags, *more]).config, environment.world_size)
        for rule, more in RULES.items()
    }
    device = torch.device("cpu")
    start(environment, "gloo", 600.0)
    runtimes = {}
    for rule, plan in plans.items():
        groups = build_process_groups(plan.topology, environment.global_rank, "gloo", 600.0)
        runtimes[rule] = TrainingRuntime(plan, groups, device)
    for number in range(options.rounds + 1):  # the first one allocates
        for rule in sorted(RULES, reverse=number % 2 == 1):
            runtime = runtimes[rule]
            for shard in runtime.optimizer.shards:
                shard.gradient.normal_()
            barrier(runtime.groups.world)
            began = time.perf_counter()
            runtime.optimizer.start(1.0, Rates(1e-3, 0.1))
            runtime.optimizer.settle()
            runtime.stores.finish_weights()
            if number:
                seconds[rule].append(time.perf_counter() - began)
    if environment.global_rank == 0:
        for rule, times in seconds.items():
            low, _, high = quantiles(times, n=4, method="inclusive")
            print(f"{rule:6} {1e3 * median(times):8.1f} ms [{1e3 * low:.1f}, {1e3 * high:.1f}]")
        elements = sum(spec.num_elements for spec in plans["muon"].specs)
        print(f"{elements:,} parameters, {environment.world_size} rank(s), torch {torch.__version__}")
    if environment.world_size > 1:
        shutdown(0)


if __name__ == "__main__":
    main()

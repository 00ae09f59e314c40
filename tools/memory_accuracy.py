"""Print the bytes of the fullest rank of small grids as planned, as counted by the dry run, and as used by real ranks.

python -m tools.memory_accuracy

Each case is trained for one step by real gloo ranks on this machine, counting every storage that an operation creates
until it is freed. Memory that kernels allocate within an operation is in none of the three.
"""

from __future__ import annotations

import torch

from megapipe.api.config import Config
from megapipe.api.planning import make_plan
from megapipe.comm.groups import build_process_groups
from megapipe.extras.dry_run.rank import count_rank, count_step
from megapipe.extras.dry_run.run import difference_text
from megapipe.extras.streams.ranks import random_batches
from megapipe.formatting import bytes_text
from megapipe.plan.memory import rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.trace.meta import LiveBytes
from tests.harness import run_ranks

SIZES = (
    "--num-layers 8 --hidden-size 192 --num-attention-heads 8 --seq-length 256 --vocab-size 4000 --micro-batch-size 2"
)
SIZES += " --global-batch-size 16 --device cpu"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 512"
LLAMA += (
    " --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0"
)
CASES: dict[str, tuple[int, str]] = {  # ranks, flags
    "GPT-2 shape, fp32": (1, "--attention-dropout 0"),
    "Llama shape, bf16": (1, f"{LLAMA} --bf16"),
    "full recompute, bf16": (
        1,
        f"{LLAMA} --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "selective recompute of norms and activations": (
        1,
        f"{LLAMA} --recompute-granularity selective --recompute-modules layernorm activation",
    ),
    "dp 2, distributed optimizer, bf16": (2, f"{LLAMA} --bf16 --use-distributed-optimizer"),
    "tp 2, sequence parallel": (2, f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2, 1F1B": (2, f"{LLAMA} --pipeline-model-parallel-size 2"),
    "pp 2, interleaved": (2, f"{LLAMA} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pp 2, ZB-H1": (2, f"{LLAMA} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "pp 2, DualPipeV": (2, f"{LLAMA} --pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v"),
}


def plan_of(name: str) -> RunPlan:
    num_ranks, flags = CASES[name]
    return make_plan(Config.from_flags([*SIZES.split(), *flags.split()]), num_ranks)


def measured_peak(rank: int, world_size: int, name: str) -> int:
    """Make a step of a case as one of its ranks and return the peak."""
    plan = plan_of(name)
    groups = build_process_groups(plan.topology, rank, "gloo", 600.0)
    with LiveBytes() as live:
        return count_step(plan, groups, torch.device("cpu"), live, random_batches(plan))[0].peak


def main() -> None:
    print("| on CPU | planned | dry run | measured | plan to measured | dry run to measured |")
    print("|---|---|---|---|---|---|")
    for name, (num_ranks, _) in CASES.items():
        plan, measured = plan_of(name), run_ranks(measured_peak, num_ranks, name, timeout=600)
        rank = max(range(num_ranks), key=measured.__getitem__)
        planned = rank_memory(plan, plan.topology.coordinates(rank).pp_rank).total
        counted = count_rank(plan, rank, random_batches(plan), "cpu", in_full=True).peak
        cells = [name, *map(bytes_text, (planned, counted, measured[rank]))]
        cells += [difference_text(measured[rank], planned), difference_text(measured[rank], counted)]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

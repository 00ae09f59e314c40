"""Print the bytes of the fullest rank of small grids as planned, as counted by the dry run, and as used by real ranks.

python tools/memory_accuracy.py

Each case is trained for one step by real gloo ranks on this machine, counting every storage that an operation creates
until it is freed. Memory that kernels allocate within an operation is in none of the three.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from megapipe.api.config import Config
from megapipe.api.planning import make_plan
from megapipe.comm.bootstrap import shutdown, start
from megapipe.comm.groups import build_process_groups
from megapipe.environment import read_environment
from megapipe.extras.dry_run.rank import count_rank, count_step
from megapipe.extras.dry_run.run import difference_text
from megapipe.extras.streams.ranks import random_batches
from megapipe.formatting import bytes_text
from megapipe.plan.memory import rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.trace.meta import LiveBytes

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
MEASURE = "--measure"
MARK = "peak bytes: "


def main(arguments: Sequence[str]) -> int:
    """Print the table, or measure one case as one of its ranks."""
    if arguments[:1] == [MEASURE]:
        return measure(arguments[1])
    print(
        "| on CPU | planned | dry run | measured | plan to measured | dry run to measured |\n|---|---|---|---|---|---|"
    )
    for name, (num_ranks, _) in CASES.items():
        plan = plan_of(name)
        measured = measured_peaks(name, num_ranks)
        rank = max(measured, key=lambda rank: measured[rank])
        planned = rank_memory(plan, plan.topology.coordinates(rank).pp_rank).total
        counted = count_rank(plan, rank, random_batches(plan), "cpu", in_full=True).peak
        cells = [name, *map(bytes_text, (planned, counted, measured[rank]))]
        cells += [difference_text(measured[rank], planned), difference_text(measured[rank], counted)]
        print("| " + " | ".join(cells) + " |", flush=True)
    return 0


def plan_of(name: str) -> RunPlan:
    num_ranks, flags = CASES[name]
    return make_plan(Config.from_flags([*SIZES.split(), *flags.split()]), num_ranks)


def measured_peaks(name: str, num_ranks: int) -> dict[int, int]:
    """Return the peak of every rank of a case, trained by real processes."""
    command = [sys.executable, "-m", "megapipe", "launch", "--nproc-per-node", str(num_ranks), __file__, MEASURE, name]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line.removeprefix(MARK)) for line in said.splitlines() if line.startswith(MARK)]
    return dict(found)


def measure(name: str) -> int:
    """Build the runtime, make a step and print the peak, as one rank."""
    plan = plan_of(name)
    world = start(read_environment(), "gloo", 600.0, "cpu", facts_of=lambda _: {})
    groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    with LiveBytes() as live:
        count, _ = count_step(plan, groups, world.device, live, random_batches(plan))
    sys.stdout.write(f"{MARK}{json.dumps([world.global_rank, count.peak])}\n")
    sys.stdout.flush()
    shutdown(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

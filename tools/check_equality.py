#!/usr/bin/env python3
"""Prove that a refactoring changes no result: record what two checkouts compute, and compare the records to the bit.

    python tools/check_equality.py record CHECKOUT before.json [--only plans] [--python EXE]
    python tools/check_equality.py compare before.json after.json

A record holds, from the command line of the checkout at CHECKOUT alone:

    grids        losses and gradient norms of drawn configurations on up to four ranks, or a refusal's exit code, and
                 of configs/quickstart.yaml on its eight ranks
    plans        numbers that `megapipe plan` prints for drawn configurations, and layouts that its search finds
    simulations  `megapipe schedule simulate --json` of drawn shapes

Both records must come from one machine and one installation of torch: kernels round differently elsewhere.
Exit code of `compare`: 0 if all is equal, 1 with the differences if not.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_GRIDS = 40  # that train; refused draws come on top
NUM_PLANS = 50
NUM_SIMULATIONS = 50


class Checkout:
    """A checkout whose commands are run. python: the interpreter with megapipe's dependencies."""

    def __init__(self, path: Path, python: str) -> None:
        self.path, self.python = path.resolve(), python

    def run(self, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = ["env", f"PYTHONPATH={self.path}", "OMP_NUM_THREADS=1", self.python, *words]
        return subprocess.run(command, cwd=folder or self.path, capture_output=True, text=True, timeout=600)

    def train(self, world_size: int, flags: list[str]) -> dict[str, Any]:
        """Return the exact losses and gradient norms of a run, as hexadecimal floats, or its exit code."""
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            words = [str(self.path / "pretrain_gpt.py"), *flags, "--metrics-file", str(metrics), "--device", "cpu"]
            if world_size > 1:
                words = ["-m", "megapipe", "launch", "--nproc-per-node", str(world_size), *words]
            ended = self.run(*words, folder=Path(folder))
            if ended.returncode:
                return {"code": ended.returncode, "message": ended.stderr.strip().rpartition("\n")[2]}
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        keys = ("loss", "grad_norm")
        return {
            "code": 0,
            "rows": [
                [row["kind"], *(float(row[key]).hex() for key in keys if isinstance(row.get(key), float))]
                for row in rows
                if row["kind"] in ("step", "evaluation")
            ],
        }


def options(draw: random.Random, table: str, share: float) -> str:
    """Return the options of a table, one a line, each drawn with this share."""
    return " ".join(line for line in table.split("\n") if line and draw.random() < share)


OPTIONS = """
--bf16
--sequence-parallel
--swiglu
--normalization RMSNorm
--use-distributed-optimizer
--recompute-granularity selective --recompute-modules core_attn mlp
--untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0
"""
TRAINING_OPTIONS = f"""{OPTIONS}
--group-query-attention --num-query-groups 2
--squared-relu
--position-embedding-type rope
--disable-bias-linear
--qk-layernorm
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--recompute-granularity selective --recompute-modules layernorm
--fp16
--clip-grad 0.1
--optimizer sgd
--calculate-per-token-loss
--label-smoothing 0.1
--attn-logit-softcapping 20
--rampup-batch-size 4 4 8
"""
PLAN_OPTIONS = f"""{OPTIONS}
--group-query-attention --num-query-groups 8
--recompute-granularity full --recompute-method block --recompute-num-layers 1
--cpu-offloading-num-layers 1
--fp8-format hybrid
--grad-reduce-in-bf16
"""
# of one chunk a rank
SCHEDULES = "auto 1f1b gpipe zb-h1 zb-h2 zb-v v-half v-min dualpipe dualpipe-v breadth-first zb-auto pipedream".split()


def pipeline(draw: random.Random, pp: int, chunks: int) -> str:
    """Return the flags of a pipeline, with a drawn schedule unless it has chunks."""
    if pp == 1:
        return ""
    kind = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    return f"--pipeline-model-parallel-size {pp} " + (kind or f"--pipeline-schedule {draw.choice(SCHEDULES)}")


def drawn_grid(draw: random.Random) -> tuple[int, list[str]]:
    """Draw (number of ranks, flags) of a tiny training run; the refusal of some draws by a rule is recorded."""
    tp, pp, dp = draw.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1)])
    chunks = draw.choice([1, 1, 2]) if pp > 1 else 1
    flags = (
        f"--num-layers {pp * chunks * draw.choice([1, 2])} --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 "
        f"--num-attention-heads 4 --vocab-size 61 --micro-batch-size {draw.choice([1, 2])} --global-batch-size 8 "
        "--train-iters 3 --lr 1e-2 --mock-data --seed 5 --log-interval 1 --eval-iters 1 --eval-interval 2 "
        f"--tensor-model-parallel-size {tp} {pipeline(draw, pp, chunks)} {options(draw, TRAINING_OPTIONS, 0.22)}"
    )
    return tp * pp * dp, flags.split()


def drawn_plan(draw: random.Random) -> tuple[int, list[str]]:
    """Draw (number of ranks, flags) of a model to plan."""
    tp, pp, dp = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4, 8, 16]), draw.choice([1, 2, 8, 64])
    flags = (
        f"--num-layers {pp * draw.choice([2, 4])} --hidden-size {draw.choice([1024, 4096])} --num-attention-heads 16 "
        f"--seq-length {draw.choice([1024, 4096])} --vocab-size 32000 --micro-batch-size {draw.choice([1, 2])} "
        f"--global-batch-size {dp * pp * 8} --train-iters 100 --lr 1e-4 --tensor-model-parallel-size {tp} "
        f"{pipeline(draw, pp, draw.choice([1, 2]))} {options(draw, PLAN_OPTIONS, 0.4)}"
    )
    return tp * pp * dp, flags.split()


QUICKSTART = (
    "--vocab-size 2048 --mock-data --train-iters 6 --lr-warmup-iters 2 --lr-wsd-decay-iters 2 --log-interval 1 "
    "--eval-iters 1"
)


def record_grids(checkout: Checkout) -> list[dict[str, Any]]:
    quickstart = ["--config", str(checkout.path / "configs" / "quickstart.yaml"), *QUICKSTART.split()]
    draw, found, trained = random.Random(13), [{"flags": "quickstart", **checkout.train(8, quickstart)}], 0
    if found[0]["code"]:
        raise SystemExit("configs/quickstart.yaml does not train: " + found[0]["message"])
    while trained < NUM_GRIDS:
        world_size, flags = drawn_grid(draw)
        result = checkout.train(world_size, flags)
        trained += result["code"] == 0
        found.append({"ranks": world_size, "flags": " ".join(flags), **result})
        print(f"grid {len(found)}: exit code {result['code']}, {trained} trained", file=sys.stderr, flush=True)
    return found


def numbers(text: str) -> list[str]:
    """Every number of a text, in order: wording may change, numbers may not."""
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?", text)


def record_plans(checkout: Checkout) -> list[dict[str, Any]]:
    draw, commands = random.Random(17), list[list[str]]()
    for _ in range(NUM_PLANS):
        ranks, flags = drawn_plan(draw)
        commands.append(["--world-size", str(ranks), "--ranks-per-node", "8", *flags])
    for gpu, count, config in (("h100", 64, "llama3_8b"), ("a100-80", 512, "gpt3_175b"), ("h200", 256, "llama3_70b")):
        commands.append(f"--gpus {count} --gpu {gpu} --config configs/{config}.yaml --json".split())
    found = []
    for words in commands:
        ended = checkout.run("-m", "megapipe", "plan", *words)
        found.append({"flags": " ".join(words), "code": ended.returncode, "numbers": numbers(ended.stdout)})
    return found


def record_simulations(checkout: Checkout) -> list[dict[str, Any]]:
    draw, found = random.Random(19), []
    names = [*SCHEDULES[1:], "naive", "interleaved", "pipedream-2bw"]
    for _ in range(NUM_SIMULATIONS):
        name, p = draw.choice(names), draw.choice([2, 4, 8])
        words = ["schedule", "simulate", name, "-p", str(p), "-m", str(p * draw.choice([2, 3, 4]))]
        words += ["-v", "2"] if name in ("interleaved", "breadth-first") else []
        words += ["--forward", str(draw.choice([1.0, 1.3])), "--weight-grad", str(draw.choice([1.0, 0.7]))]
        words += ["--p2p", str(draw.choice([0.0, 0.125]))] if draw.random() < 0.5 else []
        ended = checkout.run("-m", "megapipe", *words, "--json")
        found.append({"words": words, "code": ended.returncode, "output": json.loads(ended.stdout or "null")})
    return found


PARTS: dict[str, Callable[[Checkout], Any]] = {
    "grids": record_grids,
    "plans": record_plans,
    "simulations": record_simulations,
}


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    failed = False
    for part in PARTS:
        if part not in before or part not in after:
            print(f"{part:12} not in both records")
            failed = True
            continue
        both = zip(before[part], after[part], strict=False)
        pairs = [[{**each, "message": ""} for each in pair] for pair in both]  # messages may be reworded
        different = [pair for pair in pairs if pair[0] != pair[1]]
        print(f"{part:12} {len(pairs)} compared, {len(different)} different")
        for pair in different[:5]:
            print("  before {}\n  after  {}".format(*(json.dumps(each)[:600] for each in pair)))
        failed |= bool(different) or len(before[part]) != len(after[part])
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record what a checkout computes")
    recording.add_argument("checkout", type=Path)
    recording.add_argument("output", type=Path)
    recording.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    recording.add_argument("--python", default=sys.executable)
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(json.loads(options.before.read_text()), json.loads(options.after.read_text()))
    checkout = Checkout(options.checkout, options.python)
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    for part in options.only:
        found[part] = PARTS[part](checkout)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"recorded {part}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

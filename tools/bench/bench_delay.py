#!/usr/bin/env python3
"""What a step of delay costs: the losses of synchronous and asynchronous pipelines on the same data, over some seeds.

    launch/quickstart.sh --steps 1                    makes tokens and a tokenizer in a folder F of runs/quickstart
    python tools/bench/bench_delay.py --output runs/delay -- \\
        --data-path F/tokens_text_document --split 95,5,0 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model F/tokenizer

trains a GPT of 10M parameters in four stages with AdamW and with Muon: synchronously (1F1B), with PipeDream-2BW, with
2BW and --delay-error-feedback 1, and with PACI. Every run has the same flags otherwise, drains only at its end, and is
evaluated there. Runs that have ended are not repeated. What follows -- goes to pretrain_gpt.py.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_processes import BenchError, exit_code, make_parser
from bench_table import as_markdown

from megapipe.extras.report.folder import read_run

STAGES = 4
MODEL = (
    "--num-layers 8 --hidden-size 288 --num-attention-heads 6 --ffn-hidden-size 768 --seq-length 128 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 32 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1"
)
RATES = {"adam": "--lr 2e-3 --adam-beta2 0.95", "muon": "--lr 2e-3 --muon-extra-scale-factor 0.2"}
SCHEDULES = {
    "synchronous": "1f1b",
    "2BW": "pipedream-2bw",
    "2BW with error feedback": "pipedream-2bw --delay-error-feedback 1",
    "PACI": "paci",
}


def flags_of(schedule: str, optimizer: str, seed: int, steps: int, more: Sequence[str]) -> list[str]:
    """Return the flags of a run."""
    own = f"{MODEL} --optimizer {optimizer} {RATES[optimizer]} --pipeline-schedule {SCHEDULES[schedule]} --seed {seed}"
    grid = f"--pipeline-model-parallel-size {STAGES} --train-iters {steps} --eval-interval {steps} --eval-iters 20"
    return [*own.split(), *grid.split(), "--log-interval", "10", *more]


def final_loss(folder: Path, flags: Sequence[str]) -> float:
    """Train, unless it was done before, and return the validation loss at the end. Raises BenchError."""
    metrics = folder / "metrics.jsonl"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        metrics.unlink(missing_ok=True)
        launch = [sys.executable, "-m", "megapipe", "launch", "--nproc-per-node", str(STAGES), "pretrain"]
        with (folder / "log").open("w") as log:
            code = subprocess.run([*launch, *flags, "--metrics-file", str(metrics)], stdout=log, stderr=log).returncode
        if code:
            raise BenchError(f"a run ended with exit code {code}; see {folder / 'log'}")
        (folder / "done").touch()
    evaluations = read_run(folder).evaluations("validation")
    if not evaluations:
        raise BenchError(f"{metrics} has no validation loss: the data need a validation part")
    return float(evaluations[-1]["loss"])


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for logs and metrics.jsonl of each run")
    parser.add_argument("--steps", type=int, default=2000, help="of each run (default: 2000)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help="only this one; may be repeated")
    parser.add_argument("--optimizer", action="append", choices=RATES, help="only this one; may be repeated")
    cut = argv.index("--") if "--" in argv else len(argv)
    own, more = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    rows = [("schedule", "optimizer", "validation loss, mean", "least", "largest")]
    for optimizer in own.optimizer or RATES:
        for schedule in own.schedule or SCHEDULES:
            losses = []
            for seed in range(1, own.seeds + 1):
                folder = own.output / f"{schedule} {optimizer} {seed}".replace(" ", "_")
                losses.append(final_loss(folder, flags_of(schedule, optimizer, seed, own.steps, more)))
                print(f"{schedule}, {optimizer}, seed {seed}: {losses[-1]:.4f}", flush=True)
            mean = statistics.fmean(losses)
            rows.append((schedule, optimizer, f"{mean:.4f}", f"{min(losses):.4f}", f"{max(losses):.4f}"))
    print(f"\n{as_markdown(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))

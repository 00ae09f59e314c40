"""The parts of first_day.py: the rows of parts.tsv, the most valuable first.

A row is one of these kinds; `cpu` has the arguments of its twin on CPUs, of two ranks, where they differ:

    run      trains twelve steps on `processes` GPUs, whose times and bytes are compared with the plan's
    grid     trains a tiny model on `processes` ranks that share one GPU; the losses are those of one process
    verify   compares gradients and weights of such a grid with those of one process
    tests    runs tests of tests/cuda in `processes` workers; without a GPU they are only collected
    card     a part of card.py
    command  a command line

A command line begins with `python`, which is this interpreter, and may contain

    {out}      the path of the part's own files without suffix: .json and .jsonl files there have its figures
    {workers:N}  the flags of pytest for at most N processes; none where pytest-xdist is missing
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CPU_SECONDS = 8.0  # of a twin
CPU_FACTOR = 4.0  # of limits


@dataclass(frozen=True)
class Part:
    """One command of the day, and its twin on CPUs."""

    name: str
    decides: str
    cuda: str
    cpu: str
    seconds: float  # expected on an H100 or H200
    limit: float
    gpus: int = 1
    proves: tuple[str, ...] = ()  # rows of the table of docs/gpu.md (`page.AREAS`)
    environment: Mapping[str, str] = field(default_factory=dict)
    losses: tuple[float, ...] = ()  # of its steps, as one process on a CPU computes them
    tolerance: float = 1e-4  # relative, of these losses

    @property
    def shares_gpu(self) -> bool:
        """True if several ranks run on one GPU: its times mean nothing."""
        return "--ranks-per-gpu" in self.cuda

    def line(self, device: str) -> str:
        return self.cuda if device == "cuda" else self.cpu

    def words(self, device: str, out: Path) -> list[str]:
        """Return the command for this machine."""
        line = re.sub(r"\{workers:(\d+)\}", lambda most: _workers(int(most[1])), self.line(device))
        program, *words = shlex.split(line.replace("{out}", str(out)))
        return [sys.executable if program == "python" else program, *words]

    def digest(self, device: str) -> str:
        """Return what the record keeps of the command: a part of another digest has changed."""
        text = "\0".join([self.line(device), *map(str, sorted(self.environment.items())), str(self.losses)])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def expected(self, device: str) -> float:
        return self.seconds if device == "cuda" else min(self.seconds, CPU_SECONDS)

    def most(self, device: str) -> float:
        """Return the limit in seconds. Machines that try a twin may have few cores and other work."""
        return self.limit if device == "cuda" else CPU_FACTOR * self.limit


def _workers(most: int) -> str:
    if most == 1 or importlib.util.find_spec("xdist") is None:
        return ""
    return f"-n {min(most, os.cpu_count() or 1)} --dist worksteal"


STEPS = (
    "--train-iters 12 --micro-batch-size 1 --lr 1e-4 --mock-data --eval-iters 0 --log-interval 1 --num-workers 0 "
    "--bf16 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --untie-embeddings-and-output-weights"
)
SIZES = {  # two to four layers of models that people train; the first is that of Llama-3 8B
    "cuda": {
        "dense": "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 --vocab-size 32768",
        "experts": "--num-layers 2 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 "
        "--group-query-attention --num-query-groups 4 --seq-length 4096 --vocab-size 32768 --num-experts 128 "
        "--moe-router-topk 8 --ffn-hidden-size 768",
        "latent": "--num-layers 2 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--seq-length 4096 --vocab-size 32768 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
        "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128",
    },
    "cpu": {
        "dense": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 "
        "--vocab-size 128",
        "experts": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--vocab-size 128 --num-experts 4 --moe-router-topk 2",
        "latent": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 "
        "--vocab-size 128 --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 16 --v-head-dim 16",
    },
}
TINY = (
    "--num-layers 4 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 4 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data "
    "--num-workers 0 --eval-iters 0 --log-interval 1 --hidden-dropout 0 --attention-dropout 0 --train-iters 5 "
    "--compile-blocks off --no-compile-loss --optimizer-impl torch"
)
TINY_LOSSES = (3.5028, 3.4335, 3.4304, 3.4500, 3.3610)  # of one process on a CPU, in fp32


def run_line(row: Mapping[str, str], device: str) -> str:
    flags, ranks = row["arguments"].format(**SIZES[device]), int(row["processes"])
    start = f"python -m megapipe launch --nproc-per-node {ranks} " if ranks > 1 else "python "
    return (
        f"{start}pretrain_gpt.py {STEPS} --device {device} --global-batch-size {4 * ranks} {flags} "
        "--metrics-file {out}.jsonl"
    )


def grid_line(row: Mapping[str, str], device: str) -> str:
    """Ranks that share one GPU are hosts of their own to NCCL."""
    has_twin = device == "cpu" and row["cpu"]
    flags, ranks = (row["cpu"], 2) if has_twin else (row["arguments"], int(row["processes"]))
    ends = "" if row["kind"] == "verify" else " --metrics-file {out}.jsonl"
    shares = f"--ranks-per-gpu {ranks} " if device == "cuda" else ""
    start = f"python -m megapipe launch {shares}--nproc-per-node {ranks} pretrain_gpt.py"
    return f"{start} {TINY} --device {device} {flags}{ends}"


def tests_line(row: Mapping[str, str], device: str) -> str:
    names, _, expression = row["arguments"].partition(" -k ")
    selection = " ".join(f"tests/cuda/{name}" for name in names.split())
    selection += f" -k {shlex.quote(expression)}" if expression else ""
    how = f"--gpu {{workers:{row['processes']}}} -rfE --tb=short" if device == "cuda" else "--collect-only"
    return f"python -m pytest -p no:cacheprovider {how} {selection}"


def card_line(row: Mapping[str, str], device: str) -> str:
    return f"python tools/bench/card.py {row['name']} --json {{out}}.json --device {device}"


def command_line(row: Mapping[str, str], device: str) -> str:
    return row["cpu"] if device == "cpu" else row["arguments"]


def flags_of(words: list[str]) -> tuple[list[str], int]:
    """Return the flags of a run without its metrics file, and its number of ranks."""
    begin, file = words.index("pretrain_gpt.py") + 1, words.index("--metrics-file")
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
    return words[begin:file] + words[file + 2 :], ranks


LINES = {
    "run": run_line,
    "grid": grid_line,
    "verify": grid_line,
    "tests": tests_line,
    "card": card_line,
    "command": command_line,
}


def read_parts() -> Iterator[Part]:
    with Path(__file__).with_name("parts.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            kind, seconds = row["kind"], float(row["seconds"])
            line = LINES[kind]
            yield Part(
                row["name"],
                row["decides"],
                line(row, "cuda"),
                line(row, "cpu"),
                seconds,
                limit=min(2 * seconds + 20, 180),
                gpus=int(row["processes"]) if kind == "run" else 1,
                proves=tuple(row["proves"].split()),
                environment=dict(pair.split("=") for pair in row["environment"].split()),
                losses=TINY_LOSSES if kind == "grid" else (),
                tolerance=2e-2 if "--bf16" in row["arguments"] else 1e-4,
            )


PARTS = tuple(read_parts())

"""The parts of first_day.py, the most valuable first.

A command line begins with `python`, which is this interpreter, and may contain

    {out}      the path of the part's own files without suffix: .json and .jsonl files there have its figures
    {gpus}     the number of GPUs, at most 8
    {workers:N}  the flags of pytest for at most N processes; none where pytest-xdist is missing
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_GPUS = 8
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
    shares_gpu: bool = False  # several ranks on one GPU: its times mean nothing

    def line(self, device: str) -> str:
        return self.cuda if device == "cuda" else self.cpu

    def words(self, device: str, num_gpus: int, out: Path) -> list[str]:
        """Return the command for this machine."""
        values = {"{out}": str(out), "{gpus}": str(min(max(num_gpus, 1), MOST_GPUS))}
        line = re.sub(r"\{workers:(\d+)\}", lambda most: _workers(int(most[1])), self.line(device))
        for name, value in values.items():
            line = line.replace(name, value)
        program, *words = shlex.split(line)
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


def run(
    name: str, decides: str, seconds: float, flags: str = "", ranks: int = 1, sizes: str = "dense", proves: str = ""
) -> Part:
    """Return a part that trains twelve steps, whose times and bytes stand beside the plan's."""

    def line(device: str) -> str:
        sized = f"{SIZES[device][sizes]} {STEPS} --device {device} --global-batch-size {4 * ranks}"
        start = f"python -m megapipe launch --nproc-per-node {ranks} " if ranks > 1 else "python "
        return f"{start}pretrain_gpt.py {sized} {flags} --metrics-file {{out}}.jsonl"

    return Part(name, decides, line("cuda"), line("cpu"), seconds, 1.8 * seconds, ranks, tuple(proves.split()))


def flags_of(words: list[str]) -> tuple[list[str], int]:
    """Return the flags of a run without its metrics file, and its number of ranks."""
    begin, file = words.index("pretrain_gpt.py") + 1, words.index("--metrics-file")
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
    return words[begin:file] + words[file + 2 :], ranks


TINY = (
    "--num-layers 4 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 4 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data "
    "--num-workers 0 --eval-iters 0 --log-interval 1 --hidden-dropout 0 --attention-dropout 0 --train-iters 5 "
    "--compile-blocks off --no-compile-loss --optimizer-impl torch"
)
TINY_LOSSES = (3.5028, 3.4335, 3.4304, 3.4500, 3.3610)  # of one process on a CPU, in fp32
TP_PP = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2"
ZERO1 = "--use-distributed-optimizer"
OVERLAPPED = f"{ZERO1} --overlap-grad-reduce --overlap-param-gather"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"


def shared(ranks: int, script: str, device: str) -> str:
    """Return the start of ranks that share one GPU, each a host of its own to NCCL; on a CPU, of as many ranks."""
    flag = f"--ranks-per-gpu {ranks} " if device == "cuda" else ""
    return f"python -m megapipe launch {flag}--nproc-per-node {ranks} {script}"


def grid(
    name: str,
    decides: str,
    flags: str,
    seconds: float,
    ranks: int = 2,
    cpu: tuple[str, int] | None = None,  # flags and ranks of the twin, where it is smaller
    tolerance: float = 1e-4,
    proves: str = "nccl",
) -> Part:
    """Return a part that trains a tiny model on ranks that share one GPU and compares the losses with those of one
    process."""

    def line(device: str, flags: str, ranks: int) -> str:
        start = shared(ranks, "pretrain_gpt.py", device)
        return f"{start} {TINY} --device {device} {flags} --metrics-file {{out}}.jsonl"

    lines = line("cuda", flags, ranks), line("cpu", *(cpu or (flags, ranks)))
    rows = tuple(proves.split())
    return Part(name, decides, *lines, seconds, 2.2 * seconds, 1, rows, {}, TINY_LOSSES, tolerance, True)


def verify(name: str, decides: str, mode: str, flags: str, seconds: float, ranks: int, cpu: tuple[str, int]) -> Part:
    """Return a part that compares gradients and weights of a grid on one GPU with one process."""

    def line(device: str, flags: str, ranks: int) -> str:
        return f"{shared(ranks, 'pretrain_gpt.py', device)} {TINY} --device {device} {flags} --verify-grid {mode}"

    lines = line("cuda", flags, ranks), line("cpu", *cpu)
    return Part(name, decides, *lines, seconds, 2.2 * seconds, 1, ("nccl",), {}, shares_gpu=True)


COMPILES_NOTHING = {"TORCHDYNAMO_DISABLE": "1"}  # torch.compile hands functions back as they are
COMPILES = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}


def suite(
    name: str,
    decides: str,
    seconds: float,
    what: str,
    proves: str,
    workers: int = 12,
    gpus: int = 1,
    environment: Mapping[str, str] = COMPILES,
) -> Part:
    """Return a part that runs tests of tests/cuda; without a GPU they are only collected."""
    pytest, files = (
        "python -m pytest -p no:cacheprovider",
        " ".join(f"tests/cuda/{word}" for word in what.split(" -k ")[0].split()),
    )
    selection = f"{files} -k {shlex.quote(what.split(' -k ')[1])}" if " -k " in what else files
    cuda = f"{pytest} --gpu {{workers:{workers}}} -rfE --tb=short {selection}"
    rows = tuple(proves.split())
    cpu = f"{pytest} --collect-only {selection}"
    return Part(name, decides, cuda, cpu, seconds, min(2.0 * seconds, 150.0), gpus, rows, environment)


def tool(name: str, decides: str, seconds: float, line: str, proves: str = "", gpus: int = 1, cpu: str = "") -> Part:
    """Return a part of our own tools, which know `--device` and write figures with `--json`."""
    command = f"python tools/bench/{line} --json {{out}}.json"
    lines = f"{command} --device cuda", f"python tools/bench/{cpu or line} --json {{out}}.json --device cpu"
    return Part(name, decides, *lines, seconds, 1.8 * seconds, gpus, tuple(proves.split()))


def card(name: str, decides: str, seconds: float, proves: str = "speed") -> Part:
    return tool(name, decides, seconds, f"card.py {name}", proves)


def bench(name: str, decides: str, seconds: float, flags: str) -> Part:
    """Return a part of bench_gpu.py."""
    small = "--dtype fp32 --rounds 1 --warm-ups 1 --no-compile --contenders megapipe plain --shapes tiny"
    return tool(name, decides, seconds, f"bench_gpu.py {flags}", "speed", cpu=f"bench_gpu.py {small}")


FACTS = "python tools/bench/gpu_day/facts.py"
LLAMA8B = (
    "--config configs/llama3_8b.yaml --mock-data --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--micro-batch-size 1 --global-batch-size 8 --device cuda"
)
TINY_RANK = f"{TINY} {TP_PP} --device cpu"
PARTS = (
    Part(
        "facts",
        "Whether driver, C compiler, Python.h and shared memory are there.",
        f"{FACTS} --device cuda",
        f"{FACTS} --device cpu",
        10,
        40,
    ),
    tool("primitives", "Whether each kernel that plans rely on runs, and at which rate.", 70, "gpu_primitives.py"),
    run("run-dense", "Whether a run starts with its default kernels, and its time and bytes are the plan's.", 65),
    run("run-eager", "What compiled blocks gain: the same run without them.", 35, "--compile-blocks off"),
    Part(
        "nccl-order",
        "Whether NCCL takes two ranks on one GPU and keeps the order of messages.",
        f"{shared(2, 'tests/cuda/ranks.py', 'cuda')} order nccl",
        f"{shared(2, 'tests/cuda/ranks.py', 'cpu')} order gloo",
        20,
        45,
        proves=("nccl",),
        environment={"NCCL_DEBUG": "INFO"},
        shares_gpu=True,
    ),
    grid("nccl-dp2", "Whether overlapped reductions of ZeRO-1 are right over NCCL.", OVERLAPPED, 25),
    suite(
        "tests-kernels",
        "Whether each kernel computes what the CPU does.",
        35,
        "test_kernels.py test_checksum.py test_implementations.py "
        "-k not compiled and not fp8 and not library and not apex and not engine",
        "precision recompute checksum",
        environment=COMPILES_NOTHING,
    ),
    suite(
        "tests-training",
        "Whether jobs, resumed too, train like a CPU.",
        75,
        "test_training.py -k not over_nccl",
        "precision chunked training",
        environment=COMPILES_NOTHING,
    ),
    card("layer-bf16", "The share of the GEMM's rate that layers of Llama-3 8B reach in bf16.", 60),
    grid(
        "grid-8",
        "Whether tp 2 x pp 2 x dp 2 with interleaved 1F1B is right over NCCL.",
        f"{TP_PP} {INTERLEAVED} {ZERO1}",
        55,
        8,
        ("--pipeline-model-parallel-size 2 " + INTERLEAVED, 2),
        proves="nccl chunked",
    ),
    suite(
        "tests-features",
        "Whether experts, latent attention, Muon and slices train like a CPU.",
        50,
        "test_features.py -k gpus1 and not compiled and not fp8",
        "features",
        environment=COMPILES_NOTHING,
    ),
    card("layer-fp8", "What fp8 by tensor and by blocks gains over bf16.", 70, "fp8 speed"),
    tool(
        "rank",
        "Whether planned bytes are those of one rank of Llama-3 8B on eight GPUs.",
        45,
        f"one_rank.py 8 0 --steps 3 --flags '{LLAMA8B}'",
        "memory",
        cpu=f"one_rank.py 4 0 --steps 2 --flags '{TINY_RANK}'",
    ),
    card("memory", "Planned, counted and taken bytes of twelve configurations.", 60, "memory"),
    suite(
        "tests-compiled",
        "Whether compiled loss, optimizer, blocks and casts are right.",
        85,
        "test_features.py test_implementations.py -k compiled and not gpus2 and not on_cpus",
        "compiled",
        workers=6,
    ),
    suite(
        "tests-fp8",
        "Whether fp8 GEMMs and jobs are right.",
        75,
        "test_implementations.py test_features.py -k (fp8 or scaled_mm) and not compiled and not on_cpus",
        "fp8",
        workers=6,
    ),
    card("train-0.5b", "Tokens per second of whole steps of a 0.5B model.", 70),
    card("layer-peers", "Where megapipe stands beside torch.compile, transformers and Megatron-Core.", 85),
    verify(
        "verify-8",
        "Whether every gradient and weight of eight ranks in fp32 is that of one process.",
        "native",
        f"{TP_PP} {INTERLEAVED} {ZERO1}",
        60,
        8,
        (f"--pipeline-model-parallel-size 2 {INTERLEAVED}", 2),
    ),
    Part(
        "calibrate",
        "The rates of this machine beside those that plans assume; a hardware file.",
        "python tools/bench/measured_rates.py --device cuda --gpus {gpus} --yaml {out}.yaml --json {out}.json",
        "python tools/bench/measured_rates.py --device cpu --gpus 1 --yaml {out}.yaml --json {out}.json --seconds 3",
        40,
        90,
        proves=("clocks",),
    ),
    suite("tests-memory", "Whether a step takes the planned bytes.", 45, "test_memory.py", "memory offload", workers=3),
    suite(
        "tests-graphs",
        "Whether replayed CUDA graphs are the launched steps.",
        70,
        "test_graphs.py",
        "graphs",
        workers=6,
    ),
    card("graphs", "What CUDA graphs gain.", 45, "graphs speed"),
    card("compile", "What the trial of compiled blocks chooses, and gains.", 60, "compiled speed"),
    card("train-1.5b", "Tokens per second of whole steps of a 1.5B model.", 85),
    card("experts", "The rate of an expert layer, grouped and as a loop.", 45),
    card("optimizer", "Bytes per second of the update.", 25),
    card("latent", "The rate of latent attention.", 30),
    card("ring", "The rate of a ring of two on one GPU.", 40),
    card("muon", "What a step of Muon takes.", 30),
    card("offload", "What copies of activation offload cost.", 40, "offload speed"),
    card("carveout", "What leaving SMs to messages gains.", 25),
    suite(
        "tests-clocks", "Whether profiles and stragglers are timed right.", 50, "test_clocks.py", "clocks", workers=1
    ),
    grid(
        "grid-cp",
        "Whether a ring of two in bf16 is right over NCCL.",
        "--context-parallel-size 2 --cp-comm-type p2p --bf16",
        25,
        tolerance=2e-2,
        proves="features",
    ),
    grid("grid-zero3", "Whether ZeRO-3 is right over NCCL.", ZERO3, 25, proves="features"),
    grid(
        "grid-zb",
        "Whether a zero-bubble schedule is right over NCCL.",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        25,
    ),
    grid(
        "grid-dualpipe",
        "Whether DualPipeV is right over NCCL.",
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v",
        30,
        proves="chunked",
    ),
    run("run-experts", "Times and bytes of experts as a loop.", 50, sizes="experts"),
    run("run-experts-grouped", "Times and bytes of grouped experts.", 50, "--moe-grouped-gemm", sizes="experts"),
    run("run-latent", "Times and bytes of latent attention.", 50, sizes="latent"),
    run("run-muon", "Times and bytes of Muon.", 60, "--optimizer muon"),
    bench(
        "bench-8k",
        "Layers at sequence 8,192 beside torch.compile.",
        85,
        "--shapes 8b-8k --contenders megapipe plain --rounds 4 --warm-ups 2 --kernels",
    ),
    bench(
        "bench-fp8",
        "Layers in fp8 beside bf16.",
        85,
        "--shapes 8b-4k --contenders megapipe megapipe-fp8 --rounds 4 --warm-ups 2",
    ),
    card("pipeline-8", "Schedules with a core for each of eight ranks.", 80),
    suite("tests-bench", "Whether the contenders of the benchmark agree.", 50, "test_bench.py", "speed", workers=1),
    suite(
        "tests-libraries",
        "Whether Transformer Engine, apex and flash-attn fit, where they are installed.",
        40,
        "test_implementations.py -k library or engine or apex",
        "libraries",
        workers=4,
    ),
    suite(
        "tests-nccl",
        "Whether NCCL keeps orders and time limits, and a killed rank ends the job, on one GPU too.",
        85,
        "test_nccl.py test_training.py -k nccl and not gloo and not compiled and not equals_one_process",
        "nccl chunked",
        workers=3,
        environment=COMPILES_NOTHING,
    ),
    suite(
        "grids-zero-bubble",
        "Whether grids of zero-bubble schedules, V and DualPipe equal one process over NCCL.",
        90,
        "test_nccl.py -k nccl_equals_one_process and (zb or v-half or v-min or dualpipe)",
        "nccl",
        workers=3,
        environment=COMPILES_NOTHING,
    ),
    suite(
        "grids",
        "Whether grids of the other schedules, experts, rings and ZeRO-3 equal one process over NCCL.",
        90,
        "test_nccl.py -k nccl_equals_one_process and not (zb or v-half or v-min or dualpipe)",
        "nccl features",
        workers=3,
        environment=COMPILES_NOTHING,
    ),
    suite(
        "tests-features-2",
        "Whether features of two ranks are right over NCCL.",
        90,
        "test_features.py -k gpus2 and not compiled",
        "features chunked",
        workers=3,
        environment=COMPILES_NOTHING,
    ),
    suite(
        "tests-features-4",
        "Whether HSDP and rings in two levels are right over NCCL.",
        60,
        "test_features.py -k gpus4",
        "features",
        workers=2,
        environment=COMPILES_NOTHING,
    ),
    run("run-zero3", "Times and bytes of ZeRO-3.", 60, ZERO3, 2),
    run("run-ep", "Times and bytes of expert parallelism.", 60, "--expert-model-parallel-size 2", 2, "experts"),
    run("run-cp-p2p", "Times and bytes of a ring.", 60, "--context-parallel-size 2 --cp-comm-type p2p", 2),
    run(
        "run-cp-a2a",
        "Times and bytes of attention by all-to-all.",
        60,
        "--context-parallel-size 2 --cp-comm-type a2a",
        2,
    ),
    run(
        "run-slices",
        "Times and bytes of sequence slices.",
        60,
        "--pipeline-model-parallel-size 2 --pipe-sp-splits 2",
        2,
    ),
)

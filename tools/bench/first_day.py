#!/usr/bin/env python3
"""The first day on a machine with GPUs in one command: the machine, the tests that need a GPU, training runs and
benchmarks, each figure beside what it should be by the planner, and an archive for a report.

    python tools/bench/first_day.py --out first_day
    python tools/bench/first_day.py --out first_day --again        all parts again, or only those that are named
    python tools/bench/first_day.py --out first_day --pack         only write the page and the archive

Parts run in order of risk, each within minutes: what many others depend on comes first. A part that fails or runs out
of time does not stop the others. The same command goes on after an interruption and leaves out what has passed.
Parts that need more GPUs than there are do not run.

Writes DIR/first_day.md, DIR/NAME.log for each part, figures, and DIR.tar.gz, which holds all of it without names of
the host, the user and paths. Exits with 1 if a part failed or a bar of bench_gpu.py was missed, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import io
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

from bench_table import as_markdown
from gpu_bench.contenders import Options
from gpu_bench.shapes import Shape, configuration

from megapipe.config.load import load_config
from megapipe.errors import MegapipeError
from megapipe.extras.calibrate.rates import BACKWARD_OF_ATTENTION, GEMM_SIZES
from megapipe.extras.calibrate.rates import SIZES as SIZES_OF_CALIBRATE
from megapipe.layers.table import AttentionWork
from megapipe.plan.hardware import Hardware, hardware_of, read_hardware
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = {"megapipe": Options(), "megapipe-fp8": Options("hybrid", "delayed", True)}  # bench_gpu.py's defaults
PART_SECONDS = 1200.0
MAY_FAIL = ("gpus",)  # not every driver has this tool
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
MEGAPIPE = (sys.executable, "-m", "megapipe")
GIB = 1 << 30
IPV4 = r"\b\d{1,3}(?:\.\d{1,3}){3}\b"
IPV6 = r"(?<![\w:])(?=[0-9a-f:]*::|(?:[0-9a-f]+:){7})[0-9a-f:]+(?![\w:])"
NO_SHEET = "no data sheet of this device"

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
    },
}
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
RUNS = {  # name -> GPUs, sizes, other flags
    "run-dense": (1, "dense", ""),
    "run-experts": (1, "experts", ""),
    "run-experts-grouped": (1, "experts", "--moe-grouped-gemm"),
    "run-latent": (1, "latent", ""),
    "run-muon": (1, "dense", "--optimizer muon"),
    "run-zero3": (2, "dense", ZERO3),
    "run-ep": (2, "experts", "--expert-model-parallel-size 2"),
    "run-cp-p2p": (2, "dense", "--context-parallel-size 2 --cp-comm-type p2p"),
    "run-cp-a2a": (2, "dense", "--context-parallel-size 2 --cp-comm-type a2a"),
    "run-slices": (2, "dense", "--pipeline-model-parallel-size 2 --pipe-sp-splits 2"),
}
ON_CPU = ("run-dense", "run-ep")


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of the day and how it ended. words: the command."""

    name: str
    words: tuple[str, ...]
    code: int
    seconds: float
    last_line: str

    @classmethod
    def run(cls, name: str, words: Sequence[str], folder: Path) -> Part:
        """Run a command from the repository's root; its output goes to a log. Code 124: it ran out of time."""
        print(f"first_day: {name}: {' '.join(words)}", file=sys.stderr, flush=True)
        began, log = time.monotonic(), folder / f"{name}.log"
        with log.open("w") as file:
            try:
                code = _ended(words, file)
            except FileNotFoundError as error:
                code = 127
                file.write(f"{error}\n")
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        counts = [line for line in lines if re.search(r"\b\d+ (passed|failed|skipped|error)", line)]  # pytest's
        return cls(name, tuple(words), code, time.monotonic() - began, (counts or lines or [""])[-1][:200])


def _ended(words: Sequence[str], file: IO[str]) -> int:
    """Run a command to its end, with all of its processes, also when this one is interrupted."""
    process = subprocess.Popen(words, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(PART_SECONDS)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_words(name: str, device: str, folder: Path) -> tuple[str, ...]:
    """Return the command of a training run."""
    ranks, _, _ = RUNS[name]
    flags = [*run_flags(name, device), "--metrics-file", str(folder / name / "metrics.jsonl")]
    return (*MEGAPIPE, "launch", "--nproc-per-node", str(ranks), "pretrain_gpt.py", *flags)


def run_flags(name: str, device: str) -> list[str]:
    ranks, sizes, flags = RUNS[name]
    return f"{SIZES[device][sizes]} {STEPS} --device {device} --global-batch-size {4 * ranks} {flags}".split()


def commands(device: str, num_gpus: int, folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the parts in order of risk: what others depend on first. num_gpus: parts for more are left out."""
    features, calibrate = (*PYTEST, "tests/cuda/test_features.py"), (*MEGAPIPE, "calibrate", "--force", "--output")
    links, bench = folder / "links.yaml", ("tools/bench/bench_gpu.py", "--json")
    first = {"gpus": ("nvidia-smi", "topo", "-m"), "doctor": (*MEGAPIPE, "doctor")}
    if device == "cpu":  # only to try this tool
        small = (
            "--device cpu --dtype fp32 --rounds 1 --warm-ups 1 --no-compile --contenders megapipe plain --shapes tiny"
        )
        return {
            **first,
            "kernels": (*PYTEST, "tests/gpu/test_signatures.py"),
            "features": (*features, "--all", "--ledger-part", "all", "-k", "on_cpus and Muon"),
            **{name: run_words(name, device, folder) for name in ON_CPU},
            "links": (*calibrate, str(links), *"--device cpu --dtype bf16 --seconds 3".split()),
            "bench-tiny": (sys.executable, *bench, str(folder / "bench-tiny.json"), *small.split()),
        }

    def tests(*names: str) -> tuple[str, ...]:
        return (*PYTEST, "--gpu", *(f"tests/cuda/test_{name}.py" for name in names))

    ranks = min(num_gpus, 8)
    found = {
        **first,
        "kernels": (*tests("kernels", "implementations", "checksum", "clocks"), "tests/gpu"),
        "training": tests("training"),
        "features": (*features, "--gpu", "-k", "gpus1"),
        "memory": tests("memory", "graphs"),
        "nccl": tests("nccl"),
        "features-2": (*features, "--gpu", "-k", "gpus2"),
        "features-4": (*features, "--gpu", "-k", "gpus4"),
        **{name: run_words(name, device, folder) for name in RUNS},
        "links": (*MEGAPIPE, "launch", "--nproc-per-node", str(ranks), "-m", *calibrate[2:], str(links)),
    }
    for shape in ("8b-4k", "8b-8k"):
        file = str(folder / f"bench-{shape}.json")
        found[f"bench-{shape}"] = (sys.executable, *bench, file, "--shapes", shape, "--kernels", "--check")
    needs = {"nccl": 2, "features-2": 2, "features-4": 4} | {name: ranks for name, (ranks, _, _) in RUNS.items()}
    return {name: words for name, words in found.items() if needs.get(name, 1) <= num_gpus}


def recorded(folder: Path) -> dict[str, Part]:
    """Return the parts that have ended, those of earlier calls too."""
    file = folder / "parts.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    return {row["name"]: Part(**row | {"words": tuple(row["words"])}) for row in rows}


def record(done: Mapping[str, Part], folder: Path) -> None:
    (folder / "parts.json").write_text(json.dumps([dataclasses.asdict(part) for part in done.values()], indent=1))


def devices(device: str) -> tuple[int, str]:
    """Return the number of GPUs and the name of the first; a process of its own asks, so this one holds no memory."""
    if device == "cpu":
        return 0, "CPU"
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(0))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["?"])[-1]
        raise SystemExit(f"first_day: torch cannot use a GPU: {reason} (--device cpu only tries the tool)")
    count, _, name = asked.stdout.strip().partition(" ")
    return int(count), name


def comparison(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield rows of measured and predicted steps from bench_gpu.py's figures."""
    hardware = hardware_of(figures["device"])
    for key, found in figures["shapes"].items():
        shape = Shape(**found["shape"])
        for name, turns in found["turns"].items():
            if name not in OPTIONS:
                continue
            measured = statistics.median(turn["gradients"] + turn["update"] for turn in turns)
            if hardware is None:
                yield key, name, f"{1e3 * measured:.1f}", NO_SHEET, "", "", ""
                continue
            config = OPTIONS[name].applied_to(configuration(shape, "bf16", "cuda"))
            estimate = predict_step(resolve(config, 1), hardware)
            ratio = measured / estimate.seconds
            shares = f"{estimate.mfu / ratio:.1%}", f"{estimate.mfu:.1%}"
            yield key, name, f"{1e3 * measured:.1f}", f"{1e3 * estimate.seconds:.1f}", f"{ratio:.3f}", *shares


def run_rows(device: str, hardware: Hardware | None, folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield measured and predicted steps and bytes of the training runs, which leave out the first half of the steps:
    it compiles and allocates."""
    for name, (ranks, _, _) in RUNS.items():
        file = folder / name / "metrics.jsonl"
        if not file.exists():
            continue
        steps = [one for one in map(json.loads, file.read_text().splitlines()) if one["kind"] == "step"]
        if not steps:
            continue
        measured = statistics.median(one["step_seconds"] for one in steps[len(steps) // 2 :])
        row = name, str(ranks), f"{1e3 * measured:.1f}"
        plan = resolve(load_config(run_flags(name, device)).config, ranks)
        planned = max(rank_memory(plan, rank).total for rank in range(plan.topology.pp))
        held = max(one["memory_bytes"] or 0 for one in steps)
        bytes_text = f"{held / GIB:.2f}", f"{planned / GIB:.2f}"
        try:
            if hardware is None:
                raise MegapipeError(NO_SHEET)
            seconds = predict_step(plan, hardware).seconds
        except MegapipeError as error:
            yield (*row, str(error), "", *bytes_text)
        else:
            yield (*row, f"{1e3 * seconds:.1f}", f"{measured / seconds:.3f}", *bytes_text)


def attention_share(hardware: Hardware, device: str) -> float:
    """Return the share of the peak, forward and backward together, at the sizes that calibrate measures."""
    seq, _, _, head_size = SIZES_OF_CALIBRATE[device].attention
    # "cudnn": the kernel of --attention-impl sdpa, which calibrate measures too
    core = AttentionWork(1.0, (0.0, 0.0), BACKWARD_OF_ATTENTION, "cudnn", seq / 2, head_size)
    forward, backward = (hardware.attention_share_of(core, is_backward) for is_backward in (False, True))
    return (1.0 + core.backward_forwards) / (1.0 / forward + core.backward_forwards / backward)


def rate_rows(found: Hardware, sheet: Hardware | None, device: str, num_ranks: int) -> Iterator[tuple[str, ...]]:
    """Yield the rates that calibrate measured beside those the planner assumes."""
    seq, _, _, head_size = SIZES_OF_CALIBRATE[device].attention
    attention = f"attention of {seq} tokens, heads of {head_size}"
    size = found.gemm_shares[-1][0] if found.gemm_shares else GEMM_SIZES[-1]  # the largest that there was time for
    ways: dict[str, Callable[[Hardware], float]] = {
        "memory, TB/s": lambda h: h.pointwise_share * h.memory_bytes_per_second / 1e12,
        "peak in bf16, TFLOP/s": lambda h: h.peak("bf16") / 1e12,
        f"GEMM of {size} in bf16, TFLOP/s": lambda h: h.gemm_share(size, size, size) * h.peak("bf16") / 1e12,
        f"{attention}, in bf16, TFLOP/s": lambda h: attention_share(h, device) * h.peak("bf16") / 1e12,
        f"{attention}, of that peak (attention_share)": lambda h: attention_share(h, device),
    }
    if num_ranks > 1:
        ways["link inside the node, GB/s"] = lambda h: h.node.bytes_per_second / 1e9
    for name, rate in ways.items():
        texts = []
        for hardware in (found, sheet):
            try:
                texts.append(NO_SHEET if hardware is None else f"{rate(hardware):.3g}")
            except MegapipeError:
                texts.append("not measured")
        yield (name, *texts)


def report(done: Mapping[str, Part], device: str, num_gpus: int, name: str, folder: Path) -> str:
    """Return first_day.md."""
    hardware = hardware_of(name)
    rows = [("part", "exit code", "seconds", "last line")]
    for part in done.values():
        rows.append((part.name, str(part.code), f"{part.seconds:.0f}", part.last_line.replace("|", "/")))
    head = ("shape", "contender", "step measured, ms", "estimate, ms", "measured / estimate", "MFU", "estimate")
    tables: dict[str, list[tuple[str, ...]]] = {"bench_gpu.py": [head]}
    said, torch_version = [], ""
    for file in sorted(folder.glob("bench-*.json")):
        figures = json.loads(file.read_text())
        torch_version = figures["torch"]
        tables["bench_gpu.py"] += comparison(figures)
        said += [bar["sentence"] for found in figures["shapes"].values() for bar in found["bars"]]
    head = ("run", "GPUs", "step measured, ms", "estimate, ms", "measured / estimate", "GiB measured", "GiB planned")
    tables["Training runs"] = [head, *run_rows(device, hardware, folder)]
    tables["Rates of this machine"] = [("rate", "measured", "assumed by the planner")]
    with suppress(MegapipeError):
        tables["Rates of this machine"] += rate_rows(read_hardware(folder / "links.yaml"), hardware, device, num_gpus)
    lines = ["# The first day on this machine", "", f"{name}, torch {torch_version or '?'}", "", as_markdown(rows), ""]
    lines += ["Estimates are the planner's (megapipe plan): what a figure should be, not what was measured."]
    for title, table in tables.items():
        found = [as_markdown(table)] if len(table) > 1 else ["No figures yet: see the logs of these parts."]
        lines += ["", f"## {title}", "", *found]
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in said), ""])


def without_names(text: str, folder: Path) -> str:
    """Return a text without the names of the host and the user, their paths, addresses and serial numbers."""
    home, user, host = str(Path.home()), getpass.getuser(), socket.gethostname()
    for path, name in ((folder, "OUT"), (REPOSITORY, "REPOSITORY"), (sys.prefix, "VENV"), (home, "HOME")):
        text = text.replace(str(path), f"<{name}>")
    for word, name in ((host, "HOST"), (host.split(".")[0], "HOST"), (user, "USER")):
        if word not in ("root", "localhost"):
            text = re.sub(rf"\b{re.escape(word)}\b", f"<{name}>", text)
    text = re.sub(r"\bGPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<GPU>", text)
    return re.sub(rf"{IPV4}|{IPV6}", "<ADDRESS>", text)


def pack(folder: Path) -> Path:
    """Write the archive for a report and return its path."""
    versions = sorted(f"{one.metadata['Name']}=={one.version}" for one in distributions())
    texts = {"versions.txt": "\n".join([platform.platform(), f"Python {platform.python_version()}", *versions, ""])}
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".md", ".log", ".json", ".jsonl", ".yaml"):
            texts[str(file.relative_to(folder))] = without_names(file.read_text(errors="replace"), folder)
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in texts.items():
            content, member = text.encode(), tarfile.TarInfo(f"first_day/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("first_day"), metavar="DIR", help="default: first_day")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the tool")
    parser.add_argument("--again", nargs="*", metavar="PART", help="run parts that have passed, too: all, or these")
    parser.add_argument("--pack", action="store_true", help="run nothing, write the page and the archive")
    arguments = parser.parse_args(argv)
    folder, device = arguments.out.resolve(), arguments.device
    folder.mkdir(parents=True, exist_ok=True)
    num_gpus, name = devices(device)
    todo, done, is_interrupted = commands(device, num_gpus, folder), recorded(folder), False
    unknown = sorted(set(arguments.again or ()) - set(todo))
    if unknown:
        parser.error(f"--again {' '.join(unknown)}: the parts are {', '.join(todo)}")
    repeats = todo if arguments.again == [] else arguments.again or ()
    for part, words in {} if arguments.pack else todo.items():
        if part in done and done[part].words == words and not done[part].code and part not in repeats:
            continue
        for file in (*folder.glob(f"{part}.json"), *(folder / part).glob("*.jsonl")):  # of an earlier run
            file.unlink()
        try:
            done[part] = Part.run(part, words, folder)
        except KeyboardInterrupt:
            print(f"first_day: interrupted in {part}; the same command goes on with it", file=sys.stderr)
            is_interrupted = True
            break
        record(done, folder)
    text = report({part: done[part] for part in todo if part in done}, device, num_gpus, name, folder)
    (folder / "first_day.md").write_text(text)
    print(text)
    print(f"first_day: {folder / 'first_day.md'}; for a report: {pack(folder)}", file=sys.stderr)
    failed = any(part.code for part in done.values() if part.name not in MAY_FAIL)
    return 130 if is_interrupted else int(failed)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored in the background of a script
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))

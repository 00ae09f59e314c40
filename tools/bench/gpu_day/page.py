"""docs/gpu_tested.md, and what other pages say of GPUs, from docs/gpu_record.tsv."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench_table import as_markdown

from gpu_day.parts import PARTS, Part
from gpu_day.record import Record, Row, write_whole
from gpu_day.running import PASSED, SKIPPED

REPOSITORY = Path(__file__).resolve().parents[3]
RECORD, PAGE = Path("docs/gpu_record.tsv"), Path("docs/gpu_tested.md")
NO = "no"


class Area(NamedTuple):
    """A row of the page. name: by which parts of the day say that they prove it."""

    name: str
    what: str
    on_cpus: str  # how it is tested on a CPU
    on_fake: bool  # on a fake CUDA device
    tests: str  # that need a GPU


AREAS = (
    Area(
        "libraries",
        "Transformer Engine, apex, flash-attn",
        "mocks with the libraries' signatures",
        False,
        "test_implementations.py",
    ),
    Area(
        "fp8",
        "fp8, compiled casts and activations",
        "`torch._scaled_mm` on CPU tensors",
        True,
        "test_implementations.py",
    ),
    Area(
        "features",
        "experts, latent attention, Muon, ZeRO-2 and ZeRO-3, HSDP, expert and context parallelism",
        "losses of one process in fp32",
        True,
        "test_features.py",
    ),
    Area(
        "compiled",
        "compiled loss, optimizer and blocks",
        "inductor's CPU backend against eager",
        True,
        "test_features.py",
    ),
    Area(
        "precision",
        "bf16 and fp16, GEMMs that accumulate in fp32",
        "torch and the reference",
        True,
        "test_training.py test_kernels.py",
    ),
    Area(
        "nccl",
        "NCCL: channels, options, flight recorder; grids of ranks that share a GPU",
        "the same tests over gloo",
        False,
        "test_nccl.py",
    ),
    Area(
        "chunked",
        "chunked collectives, streams of overlapped pairs",
        "gloo; recorded order of events",
        False,
        "test_training.py",
    ),
    Area("offload", "activation offload", "copies as late or early as waits allow", True, "test_memory.py"),
    Area("recompute", "full recompute that keeps attention", "the CPU's flash kernel", True, "test_kernels.py"),
    Area(
        "graphs",
        "CUDA graphs",
        "a tape that replays recorded operations, bit-equal to eager steps",
        False,
        "test_graphs.py",
    ),
    Area(
        "clocks",
        "profiles, stragglers, calibration",
        "a simulated device with clock drift",
        False,
        "test_clocks.py",
    ),
    Area(
        "memory",
        "peak memory against the plan",
        "storages counted on CPU and meta tensors",
        True,
        "test_memory.py",
    ),
    Area("checksum", "checksums of parameters", "CPU tensors", False, "test_checksum.py"),
    Area("training", "NVTX ranges, snapshots, optimizer offload, generation", "CPU", False, "test_training.py"),
    Area(
        "drivers",
        "driver errors, one visible GPU a rank, installation",
        "mocks of driver, `nvidia-smi` and pip",
        False,
        "",
    ),
    Area("speed", "all speed figures and the planner's fp8 times", "one run on a CPU", False, "test_bench.py"),
)
HEADER = ("part", "tested on a CPU by", "fake device", "tests for a GPU", "parts of `first_day.py`", "has run on a GPU")

INTRODUCTION = """
`python tools/bench/first_day.py` runs all parts on a machine with GPUs and records them in `docs/gpu_record.tsv`,
from which `python tools/write_gpu_tested.py` writes this page. `launch/test.sh --gpu` runs the tests alone. A fake
CUDA device (`tests/fake_cuda`) runs whole optimizer steps of most kinds of configurations with shapes, dtypes and
autograd but without values.
"""
BENCHMARK = """## The first day

`tools/bench/first_day.py --minutes N` runs the parts that fit into N minutes, the most valuable first. It needs no
installation if `python3` has torch, numpy, safetensors, sentencepiece, PyYAML and pytest, and it changes no setting
of the GPU. `--list` shows all parts and what each of them decides.

| parts | what they run | GPUs |
|---|---|---|
| `facts`, `primitives` | compilers, libraries, limits; each kernel that plans rely on, and its rate | 1 |
| `run-...` | twelve steps of a few layers at real sizes, beside the plan | 1 or 2 |
| `nccl-...`, `grid-...`, `verify-8` | two to eight ranks that share one GPU, compared with one process | 1 |
| `tests-...`, `grids...` | `tests/cuda` by file; ranks share GPUs | 1 |
| `layer-...`, `train-...`, `bench-...` and others | speed, beside bars and peers | 1 |
| `rank`, `memory` | planned bytes and those taken | 1 |
| `calibrate` | a hardware file, its rates beside those of the planner | all |

A part takes 10 to 90 seconds on an H100. A part that fails, hangs or is killed does not stop the others. The same
command continues where the last one ended and comes to failed parts last. `--again PART` repeats a part, and
`--device cpu` tries all of them without a GPU.

After each part the folder `first_day` has a copy of the record, which `--merge FILE` adds to the record of another
checkout. It also has a summary, and `first_day.tar.gz` with logs and figures but without host names, users, paths
or addresses, which can be attached to an issue.

## Measure one GPU

`tools/bench/card.py` measures layers of Llama-3 8B in bf16 and fp8, whole training of Qwen2.5 0.5B and 1.5B,
experts, latent attention, a ring of two ranks, optimizers, the memory of 12 configurations, and what CUDA graphs,
compiled blocks, offload and the SM carve-out gain. Each figure is printed beside what the planner predicts and
beside a peer, most of them in the same run. `--list` has the seconds of each part. With `--device cpu` tiny twins
of all parts run, whose figures mean nothing.

```bash
python tools/bench/card.py --list
python tools/bench/card.py layer-bf16 layer-peers train-0.5b --json figures.json
```

`tools/bench/bench_gpu.py` times forward and backward of megapipe in bf16 and fp8, in turn with large GEMMs on the
same GPU, a plain Llama under torch.compile, and transformers' Llama. It prints FLOP/s, the fraction of the GEMM
rate, measured and planned peak memory, and the time by kind of kernel.

```bash
python tools/bench/bench_gpu.py --check                        # 8B-shaped layers, bf16 and fp8, sequence 4096 and 8192
python tools/bench/bench_gpu.py --shapes 125m 350m 1.3b --kernels
python tools/bench/bench_gpu.py --fp8 e4m3 --fp8-recipe tensorwise --contenders megapipe megapipe-fp8
```

All contenders have the same weights and tokens. The tool stops if losses and gradient norms of two steps differ by
more than 3 % between bf16 rows, or by 1 % (loss) and 5 % (norm) between fp8 and bf16. `--check` exits with 1 if a
bar is missed: bf16 at 0.75 of the GEMM rate, at 1.15 times transformers, and not below torch.compile. fp8 at 1.25
times bf16 is a goal that does not fail.
"""


class State(NamedTuple):
    """An area on the devices of a record: parts that passed, parts that ended otherwise, and those that never ran."""

    passed: list[Row]
    others: list[Row]
    missing: list[str]

    @property
    def is_proved(self) -> bool:
        return bool(self.passed) and not self.others and not self.missing

    @property
    def has_run(self) -> bool:
        return bool(self.passed)

    def text(self) -> str:
        """Return the last column of the page."""
        lines = []
        if self.passed:
            where = ", ".join(sorted({f"{row.device}, torch {row.torch}" for row in self.passed}))
            days = sorted(row.date[:10] for row in self.passed)
            names = "" if self.is_proved else f" in part ({_names(row.part for row in self.passed)})"
            lines.append(
                f"**yes**{names}: {where}, {days[-1]}" if self.is_proved else f"yes{names}: {where}, {days[-1]}"
            )
        for result in sorted({row.result for row in self.others}):
            lines.append(f"**{result}**: {_names(row.part for row in self.others if row.result == result)}")
        if self.missing and lines:
            lines.append(f"not yet: {_names(self.missing)}")
        return "; ".join(lines) or NO


def _names(parts: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(parts))


def on_gpus(record: Record) -> list[Row]:
    """Return the rows that ran on a GPU."""
    return [row for row in record if row.device != "CPU" and row.result != SKIPPED]


def states(record: Record, parts: Sequence[Part] = PARTS) -> dict[str, State]:
    """Return what the record shows of each area. A part that passed on one device has run, whatever others say; where
    it never passed, its latest failure stands."""
    by_part: dict[str, Row] = {}
    for row in sorted(on_gpus(record), key=lambda row: (row.result == PASSED, row.date)):
        by_part[row.part] = row
    found = {}
    for area in AREAS:
        names = [part.name for part in parts if area.name in part.proves]
        rows = [by_part[name] for name in names if name in by_part]
        passed, others = ([row for row in rows if (row.result == PASSED) is wanted] for wanted in (True, False))
        found[area.name] = State(passed, others, [name for name in names if name not in by_part])
    return found


def page_text(record: Record, parts: Sequence[Part] = PARTS) -> str:
    """Return docs/gpu_tested.md."""
    known = states(record, parts)
    rows = [HEADER]
    for area in AREAS:
        tests = ", ".join(f"`tests/cuda/{name}`" for name in area.tests.split()) or "start a run"
        names = _names([part.name for part in parts if area.name in part.proves]) or "none"
        rows.append((area.what, area.on_cpus, "yes" if area.on_fake else "no", tests, names, known[area.name].text()))
    lines = ["# What has run on a GPU", "", heading(record, parts), *INTRODUCTION.splitlines(), "", as_markdown(rows)]
    return "\n".join([*lines, "", BENCHMARK])


def heading(record: Record, parts: Sequence[Part] = PARTS) -> str:
    """Return the first sentences of the page."""
    if not on_gpus(record):
        return "Nothing has. Everything was written and tested on CPUs. The table says how, and what tests it on a GPU."
    return f"{_counts(record, parts)} All of it was tested on CPUs first. This table says how, and what ran where."


def _counts(record: Record, parts: Sequence[Part]) -> str:
    known = states(record, parts).values()
    devices = ", ".join(sorted({row.device for row in on_gpus(record)}))
    whole, some = sum(state.is_proved for state in known), sum(state.has_run and not state.is_proved for state in known)
    return f"On {devices}: {whole} of {len(AREAS)} rows have passed, {some} in part, {len(AREAS) - whole - some} not."


def sentences(record: Record, parts: Sequence[Part] = PARTS) -> Mapping[str, str]:
    """Return what other pages say between <!-- gpu --> and <!-- /gpu -->, by page."""
    ran = bool(on_gpus(record))
    counts = _counts(record, parts) if ran else ""
    link = "[gpu_tested.md](gpu_tested.md)"
    return {
        "README.md": f"{counts} [This table](docs/gpu_tested.md) says which, and how the others were tested."
        if ran
        else "**Nothing has run on a GPU yet**; [this table](docs/gpu_tested.md) says how each part was tested.",
        "docs/index.md": counts if ran else "nothing yet",
        "docs/gpu.md": f"{counts} {link} says which, and how the others were tested."
        if ran
        else f"**Nothing on this page has run on a GPU yet**; {link} says how each part was tested instead.",
        "docs/roadmap.md": f"{counts}" if ran else "Nothing has run on a GPU:",
    }


def with_sentence(text: str, sentence: str) -> str:
    """Return a page with another sentence between its marks. Raises ValueError if it has no marks."""
    made, count = re.subn(
        r"<!-- gpu -->.*?<!-- /gpu -->", lambda _: f"<!-- gpu -->{sentence}<!-- /gpu -->", text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{count} pairs of <!-- gpu --> and <!-- /gpu -->; there is one on each page that names GPUs")
    return made


def pages(root: Path = REPOSITORY) -> dict[Path, str]:
    """Return the pages that follow from the record of a checkout, as they should be."""
    record = Record.read(root / RECORD)
    found = {root / PAGE: page_text(record)}
    for name, sentence in sentences(record).items():
        found[root / name] = with_sentence((root / name).read_text(encoding="utf-8"), sentence)
    return found


def write(root: Path = REPOSITORY) -> list[Path]:
    """Write the pages that have changed, and return them."""
    changed = [
        file for file, text in pages(root).items() if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    for file, text in pages(root).items():
        if file in changed:
            write_whole(file, text)
    return changed

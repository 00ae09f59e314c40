"""The report of one call of card.py: figures, bars, sentences and failures, saved after each measurement."""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from bench_table import as_markdown

from megapipe.extras.doctor.host import resources
from megapipe.plan.hardware import Hardware, hardware_named, hardware_of

GOAL = " (goal)"  # at the end of a bar's name


@dataclass(frozen=True)
class Bar:
    """A figure that has to reach a least value, or stay below a largest one. A goal is marked in its name."""

    name: str
    value: float
    bar: float
    met: bool

    @property
    def is_goal(self) -> bool:
        return self.name.endswith(GOAL)


class Report:
    """What one call found. hardware: the data sheet of predictions; that of an H100 where no GPU is measured.

    file: that of --json. shape: the sizes of layers, a name of `jobs.SHAPES`.
    """

    def __init__(self, device: str, file: Path | None = None, shape: str | None = None) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.on_gpu = device == "cuda"
        self.shape = shape or ("8b-8k" if self.on_gpu else "tiny")
        self.file, self._part = file, ""
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else ""
        self.hardware: Hardware | None = hardware_of(name) if self.on_gpu else hardware_named("h100")
        self.figures: dict[str, float] = {}
        self.bars: list[Bar] = []
        self.sentences = [] if self.on_gpu else ["tiny twins on a CPU: no figure and no bar means anything"]
        self.failed: dict[str, str] = {}
        self.rows: list[tuple[str, ...]] = []
        has = resources()
        self.machine = {
            "device": name or f"CPU: {has.cpu}",
            "cores": has.cores,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "predictions": "none" if self.hardware is None else self.hardware.name,
        }

    @property
    def total_memory(self) -> int:
        """Bytes of the GPU."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        predicted: float | None = None,
        peer: tuple[str, float] | None = None,
    ) -> None:
        """Add a figure of the running part, beside what the planner predicts and what a peer reaches."""
        full = f"{self._part}.{name}"
        self.figures[full] = value
        cells = ["", ""]
        if predicted is not None:
            self.figures[f"{full}.predicted"] = predicted
            cells = [f"{predicted:.4g}", f"{value / predicted:.3f}" if predicted else ""]
        said = ""
        if peer is not None:
            self.figures[f"{full}.{peer[0]}"] = peer[1]
            said = f"{peer[0]} {peer[1]:.4g}"
        self.rows.append((full, f"{value:.4g} {unit}", *cells, said))

    def bar(self, name: str, value: float, bar: float, *, is_goal: bool = False, at_most: bool = False) -> None:
        met = value <= bar if at_most else value >= bar
        self.bars.append(Bar(f"{self._part}.{name}" + GOAL * is_goal, value, bar, met))

    def say(self, sentence: str) -> None:
        self.sentences.append(f"{self._part}: {sentence}")

    def run(self, name: str, measure: Callable[[Report], None]) -> None:
        """Run a part: its figures have this name before theirs, and what it raises is recorded."""
        self._part = name
        print(f"card: {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        with self.attempt():
            measure(self)
        self.figures[f"{name}.seconds"] = time.monotonic() - began
        torch._dynamo.reset()  # another part would be compiled for dynamic sizes, which is slower
        self.save()

    @contextmanager
    def attempt(self, name: str = "") -> Iterator[None]:
        """Run a measurement. What it raises is recorded and does not stop the others.

        Afterwards tensors that only cycles keep are freed, and what there is so far is saved.
        """
        key = f"{self._part}.{name}" if name else self._part
        try:
            yield
        except Exception as error:  # of any kind: of a library, a driver, a compiler
            traceback.print_exc()
            self.failed[key] = f"{type(error).__name__}: {str(error).strip()[:600]}"
        finally:
            if self.on_gpu:
                gc.collect()
                with suppress(RuntimeError):  # a driver that has failed raises again
                    torch.cuda.empty_cache()
            self.save()

    def as_json(self) -> dict[str, Any]:
        return {
            "figures": self.figures,
            "bars": [asdict(bar) for bar in self.bars],
            "sentences": self.sentences,
            "failed": self.failed,
            "machine": self.machine,
        }

    def save(self) -> None:
        if self.file is not None:
            self.file.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def text(self) -> str:
        """Return the table, the bars, the sentences and the failures."""
        sheet = self.machine["predictions"]
        head = ("figure", "measured", f"predicted ({sheet})", "measured / predicted", "peer")
        lines = [", ".join(f"{key} {value}" for key, value in self.machine.items() if value), ""]
        lines += [as_markdown([head, *self.rows])] if self.rows else ["No figures."]
        lines.append("")
        for bar in self.bars:
            lines.append(f"- {bar.name}: {bar.value:.4g}, bar {bar.bar:g}: {'met' if bar.met else 'NOT MET'}")
        lines += [f"- {sentence}" for sentence in self.sentences]
        lines += [f"- FAILED {name}: {text}" for name, text in self.failed.items()]
        return "\n".join(lines)

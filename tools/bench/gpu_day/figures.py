"""Numbers of a part from the files that it left, beside what the planner expects of this device."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_day.parts import Part, flags_of
from megapipe.config.load import load_config
from megapipe.errors import MegapipeError
from megapipe.plan.hardware import Hardware, hardware_of
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step

GIB = 1 << 30
COUNTS = re.compile(r"\b(\d+)(?:/\d+)? (passed|failed|skipped|errors?|tests collected)\b")


@dataclass
class Found:
    """figures: for the record. sentences: for the summary. problem: why a part that ended well has failed."""

    figures: dict[str, float] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    problem: str = ""


def figures_of(part: Part, words: Sequence[str], out: Path, log: Path, device_name: str) -> Found:
    """Return what a part found. Files that are missing or incomplete have no figures."""
    found = Found()
    hardware = hardware_of(device_name)
    try:
        if "pytest" in words:
            found.figures |= _test_counts(log)
        metrics, file = (out.with_name(f"{out.name}{suffix}") for suffix in (".jsonl", ".json"))  # a name may have dots
        if metrics.exists():
            _add_run(found, part, flags_of(list(words)), _steps(metrics), hardware)
        if file.exists():
            _add_tool(found, json.loads(file.read_text()))
        elif "--json" in words:
            found.problem = "it has written no figures"
    except (KeyError, TypeError, ValueError, OSError, MegapipeError) as error:
        found.problem = f"first_day cannot read what this part wrote: {type(error).__name__}: {error}"
    found.figures = {name: float(f"{value:.5g}") for name, value in found.figures.items() if math.isfinite(value)}
    return found


def _test_counts(log: Path) -> dict[str, float]:
    """Return pytest's counts, from its last line."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if counts := COUNTS.findall(line):
            return {kind.removeprefix("tests ").rstrip("s"): float(number) for number, kind in counts}
    return {}


def _steps(file: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, file.read_text().splitlines()) if row["kind"] == "step"]


def _add_run(
    found: Found, part: Part, command: tuple[list[str], int], steps: list[dict[str, Any]], hardware: Hardware | None
) -> None:
    """Add the last loss, and of a run that has its GPUs alone the step and the bytes beside the plan's. The first half
    of the steps compiles and allocates."""
    losses = [float(step["loss"]) for step in steps]
    if losses:
        found.figures["loss"] = losses[-1]
    differences = (abs(mine / other - 1) for mine, other in zip(losses, part.losses, strict=False))
    if part.losses and not (len(losses) == len(part.losses) and all(each <= part.tolerance for each in differences)):
        found.problem = f"the losses {losses} are not those of one process, {list(part.losses)}"
    if part.shares_gpu or not steps:
        return
    flags, ranks = command
    plan = resolve(load_config(flags).config, ranks)
    measured = statistics.median(step["step_seconds"] for step in steps[len(steps) // 2 :])
    found.figures["step_ms"] = 1e3 * measured
    if flags[flags.index("--device") + 1] == "cuda":  # on a CPU it is the memory of the process
        found.figures["gib"] = max(step["memory_bytes"] or 0 for step in steps) / GIB
    found.figures["planned_gib"] = max(rank_memory(plan, rank).total for rank in range(plan.topology.pp)) / GIB
    if hardware is None:
        return
    try:
        estimate = predict_step(plan, hardware)
    except MegapipeError as error:
        found.sentences.append(f"no estimate: {error}")
        return
    ratio = measured / estimate.seconds
    found.figures |= {"planned_ms": 1e3 * estimate.seconds, "measured/planned": ratio, "mfu": estimate.mfu / ratio}


def _add_tool(found: Found, data: Mapping[str, Any]) -> None:
    """Add what a tool wrote with --json: {"figures": {name: number}, "bars": [...], "sentences": [...]}."""
    found.figures |= {name: float(value) for name, value in data["figures"].items()}
    bars = data.get("bars", [])
    found.sentences += data.get("sentences", [])
    found.sentences += [
        f"{bar['name']}: {bar['value']:.4g}, the bar is {bar['bar']:.4g}: {'met' if bar['met'] else 'NOT met'}"
        for bar in bars
    ]
    if bars:
        found.figures |= {"bars": float(len(bars)), "bars_met": float(sum(bar["met"] for bar in bars))}

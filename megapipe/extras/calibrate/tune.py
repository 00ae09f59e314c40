"""Measurement of the settings that make a run fastest on this machine (`megapipe calibrate --tune`)."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megapipe.assembly.datasets import planned
from megapipe.config.config import fields_by_key
from megapipe.config.flags import flag_words
from megapipe.config.load import DEFAULT, LoadedConfig, load_config
from megapipe.config.tuned import TUNABLE, Tuned
from megapipe.errors import ConfigError, MegapipeError
from megapipe.plan.run_plan import RunPlan

# Every candidate is a separate run under `megapipe launch`: NCCL and CUDA read some settings only when they start.
DEPTH, OVERLAP, CHUNKS, CARVEOUT, NCCL = TUNABLE
MARGIN = 0.02  # a candidate must be faster by more than this share
WARM_UP_STEPS = 2  # not counted: first touches, connections, algorithms
Settings = Mapping[str, Any]  # 'section.name' -> value
Measure = Callable[[Settings], list[float]]  # a run with these settings -> seconds of each counted step


@dataclass(frozen=True)
class Figure:
    """The measured steps of one candidate, over both of its runs."""

    settings: Settings
    step_seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return median(self.step_seconds)


def tune(flags: Sequence[str], num_ranks: int, num_steps: int) -> tuple[Tuned, list[Figure]]:
    """Return the fastest settings of a configuration on so many ranks of this machine, and all that was measured.

    num_steps: counted in each run. Raises ConfigError where nothing can be varied.
    """
    loaded = load_config(flags)
    plan = planned(loaded, num_ranks, num_ranks)

    import torch  # after errors in the flags, since it takes seconds

    from megapipe.train.gpu_setup import device_kind

    is_gpu = loaded.config.training.device != "cpu" and torch.cuda.is_available()
    decisions = tuple(choices(plan, loaded, is_gpu))
    if not decisions:
        raise ConfigError("nothing to tune: the run has neither tp nor pp, or its flags and files give every setting")
    load = os.getloadavg()[0]
    settings, figures = search(iter(decisions), measured_run(flags, num_ranks, num_steps))
    measured = {
        "command": shlex.join(["megapipe", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"torch": str(torch.__version__), "cuda": torch.version.cuda, "python": platform.python_version()},
        "load_before": round(load, 1),
        "steps": [{"settings": dict(each.settings), "step_seconds": list(each.step_seconds)} for each in figures],
    }
    return Tuned(device_kind(torch.device("cuda" if is_gpu else "cpu")), settings, measured), figures


def figures_text(figures: Sequence[Figure], chosen: Settings) -> str:
    """Return the table of all candidates, and the settings that are kept."""
    lines = ["  median ms   fastest   slowest  settings"]
    for each in figures:
        times = (each.median_seconds, min(each.step_seconds), max(each.step_seconds))
        numbers = "{:11.1f}{:10.1f}{:10.1f}".format(*(1000 * seconds for seconds in times))
        lines.append(f"{numbers}  {' '.join(flags_of(each.settings)) or 'as given'}")
    return "\n".join([*lines, f"fastest: {' '.join(flags_of(chosen)) or 'as given'}"])


def choices(plan: RunPlan, loaded: LoadedConfig, is_gpu: bool) -> Iterator[tuple[Settings, ...]]:
    """Yield the alternatives to the run's own settings, those of one decision at a time.

    What the user's flags and files give is not varied: it would win over the tuned value.
    """
    config, topology = plan.config, plan.topology
    free = {key for key in TUNABLE if loaded.origins[key] == DEFAULT or loaded.origins[key].startswith("tuned ")}
    positions = config.model.seq_length // topology.tp
    if topology.pp > 1 and DEPTH in free:
        yield tuple({DEPTH: depth} for depth in (1, 2, 3, 4))
    if topology.tp > 1 and {OVERLAP, CHUNKS} <= free and config.kernels.transformer_impl == "local":
        chunks = [{OVERLAP: True, CHUNKS: count} for count in (2, 4) if count <= positions]
        yield ({OVERLAP: False}, *chunks)
    if is_gpu and topology.pp > 1 and topology.cp == topology.ep == 1 and NCCL in free:  # a limit of the whole process
        yield tuple({NCCL: [f"NCCL_MAX_P2P_NCHANNELS={count}"]} for count in (2, 4, 8))
    if is_gpu and topology.tp > 1 and CARVEOUT in free:
        yield tuple({CARVEOUT: count} for count in (0, 8, 16, 24))


def search(decisions: Iterator[tuple[Settings, ...]], measure: Measure) -> tuple[Settings, list[Figure]]:
    """Take the decisions one after the other, each with the best of those before; return the settings and all figures.

    Candidates of a decision run in order and once more in reverse, so that a machine that slows down favours none. The
    run as it is comes first among them, and holds unless another is faster by MARGIN.
    """
    chosen: Settings = {}
    figures: list[Figure] = []
    for alternatives in decisions:
        candidates = [chosen, *({**chosen, **each} for each in alternatives)]
        seconds: list[list[float]] = [[] for _ in candidates]
        for index in (*range(len(candidates)), *reversed(range(len(candidates)))):
            seconds[index] += measure(candidates[index])
        found = [Figure(settings, tuple(each)) for settings, each in zip(candidates, seconds, strict=True)]
        figures += found
        best = min(found, key=lambda figure: figure.median_seconds)
        if best.median_seconds < found[0].median_seconds * (1.0 - MARGIN):
            chosen = best.settings
    return chosen, figures


def flags_of(settings: Settings) -> list[str]:
    """Return the flags that give a run these settings."""
    return [word for key, value in settings.items() for word in flag_words(fields_by_key()[key], value)]


def measured_run(flags: Sequence[str], num_ranks: int, num_steps: int) -> Measure:
    """Return the function that runs the configuration for WARM_UP_STEPS + num_steps steps and returns their seconds.

    Nothing is saved or loaded, and nothing evaluated. Raises MegapipeError with the run's output if it fails.
    """

    def measure(settings: Settings) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            own = f"--save none --load none --eval-iters 0 --log-interval 1 --exit-interval {WARM_UP_STEPS + num_steps}"
            launch = ["-m", "megapipe", "launch", "--nproc-per-node", str(num_ranks), "pretrain"]
            words = [*flags, *flags_of(settings), *own.split(), "--metrics-file", str(metrics)]
            done = subprocess.run([sys.executable, *launch, *words], capture_output=True, text=True)
            if done.returncode:
                shown = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
                raise MegapipeError(f"the run with {' '.join(flags_of(settings)) or 'no change'} failed:\n{shown}")
            lines = map(json.loads, metrics.read_text().splitlines())
            seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
        if len(seconds) < WARM_UP_STEPS + num_steps:
            wanted = WARM_UP_STEPS + num_steps
            raise ConfigError(
                f"the run ended after {len(seconds)} of {wanted} steps; give --train-iters {wanted} or more"
            )
        return seconds[WARM_UP_STEPS:]

    return measure

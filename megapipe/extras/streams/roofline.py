"""`roofline_text`: the roofline of a configuration, whose launches a child process counts on the fake device.

Torch-free, so that `megapipe plan` starts quickly; the child hides the machine's GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from megapipe.assembly.datasets import with_vocabulary
from megapipe.config.load import load_config
from megapipe.environment import prefixed
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.streams import device
from megapipe.extras.streams.launches import (
    Launch,
    Roofline,
    achievable,
    launch_seconds,
    ranks_to_count,
    report,
    roofline,
)
from megapipe.extras.streams.order import Mark, Wait
from megapipe.extras.streams.smallest import smallest
from megapipe.extras.streams.timeline import timed
from megapipe.plan.hardware import Hardware
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.world_rules import rules_of_world

Logs = Mapping[int, Sequence[Any]]  # global rank -> Launch, Mark and Wait of one step
KINDS: dict[str, Any] = {"launch": Launch, "mark": Mark, "wait": Wait}
SAYS_AFTER = 10.0  # seconds


def plans_of(flags: Sequence[str]) -> tuple[RunPlan, RunPlan, list[str]]:
    """Return the plan of a configuration on GPUs, the one that is counted in its place, and what was cut.

    flags: with --world-size.
    """
    loaded = load_config(["--plan", *flags], is_job=False, more=rules_of_world)
    config, requests = loaded.config, loaded.requests
    if config.training.device == "cpu":
        raise ConfigError("--device cpu: --roofline counts the kernels of a GPU; leave it out")
    assert requests.world_size is not None
    config = dataclasses.replace(
        with_vocabulary(config),
        training=dataclasses.replace(config.training, device="cuda"),
        gpu=dataclasses.replace(config.gpu, cuda_graph_impl="none"),  # they launch the same
    )
    plan = resolve(config, requests.world_size, requests.ranks_per_node)
    return plan, *smallest(config, plan, has_all_pairs=False)


def counted_plan(flags: Sequence[str]) -> tuple[RunPlan, tuple[int, ...]]:
    """Return the plan to count, and ranks that together hold every kind of layer."""
    _, small, _ = plans_of(flags)
    return small, tuple(small.topology.group_of("pp", 0)[pp_rank] for pp_rank in ranks_to_count(small))


def roofline_of(flags: Sequence[str], hardware: Hardware) -> tuple[Roofline, list[str]]:
    """Return the roofline of a configuration, and what was cut from the counted step. Raises MegapipeError."""
    plan, small, cut = plans_of(flags)
    seconds = launch_seconds(plan, achievable(hardware))
    counted = {rank: timed(log, seconds) for rank, log in count_in_child(flags).items()}
    return roofline(plan, small, hardware, counted), cut


def roofline_text(flags: Sequence[str], hardware: Hardware) -> str:
    """Return what --roofline prints."""
    return report(*roofline_of(flags, hardware), hardware)


def count_in_child(flags: Sequence[str]) -> Logs:
    """Count in a process of its own. Raises MegapipeError."""
    if (reason := device.missing()) is not None:
        raise ConfigError(f"--roofline counts on a fake CUDA device, which it compiles: {reason}")
    library = device.build()
    environment = prefixed("") | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "megapipe.extras.streams.count", str(library), *flags]
    late = threading.Timer(SAYS_AFTER, print, ["roofline: counting the kernels of two steps ..."], {"file": sys.stderr})
    late.start()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    finally:
        late.cancel()
    if ended.returncode:
        raise MegapipeError(f"--roofline cannot count this step: {(ended.stderr.strip().splitlines() or ['?'])[-1]}")
    return read(json.loads(ended.stdout.splitlines()[-1]))


def written(logs: Logs) -> dict[str, list[list[Any]]]:
    """Return logs as `read` takes them, for JSON."""
    names = {kind: name for name, kind in KINDS.items()}
    return {str(rank): [[names[type(entry)], *entry] for entry in log] for rank, log in logs.items()}


def read(found: Mapping[str, Sequence[Sequence[Any]]]) -> Logs:
    """Return the logs that `written` has written."""
    return {int(rank): [KINDS[name](*fields) for name, *fields in log] for rank, log in found.items()}

"""`megapipe plan --gpus N`: the search for a layout, from the command line to its text, its JSON and a file to run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megapipe.cli.pretrain import with_vocabulary
from megapipe.config.config import Config
from megapipe.config.load import LoadedConfig, load_config
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import ConfigError
from megapipe.planner.hardware import Hardware, hardware_named, read_hardware
from megapipe.planner.layout import Layout
from megapipe.planner.resolve import resolve
from megapipe.planner.search import Candidate, predict_plan, search
from megapipe.planner.search_report import search_json, search_text

# what a flag of the command line pins: its field, and the same of a layout
PINS: dict[str, Callable[[Layout, Config], bool]] = {
    "parallel.tensor_model_parallel_size": lambda layout, config: layout.tp == config.parallel.tensor_model_parallel_size,
    "parallel.pipeline_model_parallel_size": lambda layout, config: layout.pp == config.parallel.pipeline_model_parallel_size,
    "parallel.pipeline_schedule": lambda layout, config: config.parallel.pipeline_schedule in ("auto", layout.schedule),
    "parallel.num_virtual_stages_per_pipeline_rank": lambda layout, config: (
        layout.chunks == (config.parallel.num_virtual_stages_per_pipeline_rank or 1)
    ),
    "training.micro_batch_size": lambda layout, config: layout.micro_batch_size == config.training.micro_batch_size,
    "recompute.recompute_granularity": lambda layout, config: (
        layout.recompute.recompute_granularity == config.recompute.recompute_granularity
    ),
}


def asks_for_search(arguments: Sequence[str]) -> bool:
    return any(word.split("=")[0] in ("--gpus", "--gpu", "--hardware") for word in arguments)


def run(arguments: Sequence[str]) -> int:
    """Search and print; returns the exit code, 1 where nothing fits. Raises ConfigError."""
    own, rest = _own_flags(arguments)
    hardware = _hardware(own)
    loaded = load_config(["--plan", *rest], is_job=False)
    config = with_vocabulary(loaded.config)
    pins = [rule for key, rule in PINS.items() if loaded.origins[key].startswith("flag ")]
    found = search(config, own.gpus, hardware, lambda layout: all(rule(layout, config) for rule in pins))
    configured = as_configured(config, own.gpus, hardware)
    if own.json:
        print(json.dumps(search_json(found, hardware, configured), indent=2))
    else:
        print(search_text(found, hardware, configured))
    if not found.best:
        return 1
    if own.output is not None:
        _write(own.output, loaded, found.best[0])
        if not own.json:
            print(f"written: {own.output}, to run with pretrain_gpt.py --config {own.output}")
    return 0


def as_configured(config: Config, world_size: int, hardware: Hardware) -> Candidate | str:
    """The prediction of what the configuration itself says, or why it cannot run."""
    try:
        plan = resolve(config, world_size, hardware.ranks_per_node)
    except ConfigError as error:
        return str(error)
    t, size = plan.topology, config.training.micro_batch_size
    return predict_plan(Layout(t.tp, t.pp, plan.num_chunks, plan.schedule_name, size, config.recompute), plan, hardware)


def _own_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="megapipe plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--gpu")
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    own, rest = parser.parse_known_args(arguments)
    if own.gpus is None or own.gpus < 1:
        raise ConfigError("a search needs --gpus N, the number of accelerators, 1 or more")
    if any(word.split("=")[0] in ("--world-size", "--ranks-per-node") for word in rest):
        raise ConfigError("--gpus N searches for a layout, --world-size N shows the one configured; give one of the two")
    return own, rest


def _hardware(own: argparse.Namespace) -> Hardware:
    if (own.gpu is None) == (own.hardware is None):
        raise ConfigError("say what the accelerators are: either --gpu NAME of the table (such as h100), or --hardware FILE")
    return hardware_named(own.gpu) if own.hardware is None else read_hardware(own.hardware)


def _write(path: Path, loaded: LoadedConfig, winner: Candidate) -> None:
    try:
        path.write_text(to_yaml(winner.layout.applied_to(loaded.config)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error}") from None

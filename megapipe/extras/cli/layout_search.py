"""`megapipe plan --gpus N`: the search for a layout: command line, text, JSON and configuration file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megapipe.config.config import Config
from megapipe.config.load import LoadedConfig, load_config
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import ConfigError
from megapipe.extras.cli.pretrain import with_vocabulary
from megapipe.extras.search.layout import Layout
from megapipe.extras.search.objective import OBJECTIVES, Objective, choose
from megapipe.extras.search.search import Candidate, predict_plan
from megapipe.extras.search.search_report import SearchReport
from megapipe.plan.hardware import Hardware, hardware_named, read_hardware
from megapipe.plan.resolve import resolve

ESTIMATORS = ("megapipe", "megatron")

# fields that a flag of the command line pins -> True if a layout has the configured value
PINS: dict[str, Callable[[Layout, Config], bool]] = {
    "parallel.tensor_model_parallel_size": lambda layout, config: (
        layout.tp == config.parallel.tensor_model_parallel_size
    ),
    "parallel.pipeline_model_parallel_size": lambda layout, config: (
        layout.pp == config.parallel.pipeline_model_parallel_size
    ),
    "parallel.pipeline_schedule": lambda layout, config: config.parallel.pipeline_schedule in ("auto", layout.schedule),
    "parallel.num_virtual_stages_per_pipeline_rank": lambda layout, config: (
        layout.chunks == (config.parallel.num_virtual_stages_per_pipeline_rank or 1)
    ),
    "training.micro_batch_size": lambda layout, config: layout.micro_batch_size == config.training.micro_batch_size,
    "parallel.sequence_parallel": lambda layout, config: (
        layout.tp == 1 or layout.sequence_parallel == config.parallel.sequence_parallel
    ),
    "parallel.use_distributed_optimizer": lambda layout, config: (
        layout.distributed_optimizer == config.parallel.use_distributed_optimizer
    ),
    "parallel.pipeline_balance": lambda layout, config: (
        layout.cut == config.parallel.pipeline_balance or layout.pp == 1
    ),
    "recompute.recompute_granularity": lambda layout, config: (
        layout.recompute.recompute_granularity == config.recompute.recompute_granularity
    ),
}


def asks_for_search(arguments: Sequence[str]) -> bool:
    return any(word.split("=")[0] in ("--gpus", "--gpu", "--hardware") for word in arguments)


def take_estimator(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Return (True if --estimator megatron was given, the other arguments). Raises ConfigError for other estimators."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--estimator", default=ESTIMATORS[0])
    try:
        own, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"megapipe plan: {error}") from None
    if own.estimator not in ESTIMATORS:
        raise ConfigError(f"--estimator {own.estimator}: choose {', '.join(ESTIMATORS)}")
    return own.estimator == "megatron", rest


def run(arguments: Sequence[str]) -> int:
    """Search, print and return the exit code, 1 if nothing fits. Raises ConfigError."""
    by_megatron, arguments = take_estimator(arguments)
    own, rest = _own_flags(arguments)
    hardware = _hardware(own)
    objective = _objective(own, hardware)
    loaded = load_config(["--plan", *rest], is_job=False)
    config = with_vocabulary(loaded.config)
    if config.offload.cpu_offloading_num_layers:
        raise ConfigError(
            f"--cpu-offloading-num-layers {config.offload.cpu_offloading_num_layers}: the search does not vary it "
            "and compares layouts without; leave it out, and add it to the layout that is found (--plan shows what "
            "it saves)"
        )
    pins = [rule for key, rule in PINS.items() if loaded.origins[key].startswith("flag ")]
    chosen = choose(config, own.gpus, hardware, objective, lambda layout: all(rule(layout, config) for rule in pins))
    configured = as_configured(config, chosen.best.num_gpus, hardware)
    report = SearchReport(chosen, objective, hardware, configured, by_megatron)
    print(json.dumps(report.data(), indent=2) if own.json else report.text())
    if not report.found.best:
        return 1
    if own.output is not None:
        _write(own.output, loaded, report.found.best[0])
        if not own.json:
            print(f"written: {own.output}, to run with pretrain_gpt.py --config {own.output}")
    return 0


def as_configured(config: Config, world_size: int, hardware: Hardware) -> Candidate | str:
    """Predict the layout of the configuration itself, or return why it cannot run."""
    try:
        plan = resolve(config, world_size, hardware.ranks_per_node)
    except ConfigError as error:
        return str(error)
    t, parallel = plan.topology, config.parallel
    layout = Layout(
        t.tp,
        t.pp,
        plan.num_chunks,
        plan.schedule_name,
        config.training.micro_batch_size,
        config.recompute,
        parallel.sequence_parallel,
        parallel.use_distributed_optimizer or t.dp == 1,
        parallel.pipeline_balance,
    )
    return predict_plan(layout, plan, hardware)


def _own_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="megapipe plan", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--gpu")
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--objective", default="time")
    parser.add_argument("--price", type=float)
    parser.add_argument("--tokens-per-second", type=float)
    parser.add_argument("--json", action="store_true")
    try:
        own, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"megapipe plan: {error}") from None
    if own.objective not in OBJECTIVES:
        raise ConfigError(f"--objective {own.objective}: choose {', '.join(OBJECTIVES)}")
    if own.gpus is None or own.gpus < 1:
        raise ConfigError("a search needs --gpus N, the number of accelerators, 1 or more")
    if any(word.split("=")[0] in ("--world-size", "--ranks-per-node") for word in rest):
        raise ConfigError(
            "--gpus N searches for a layout, --world-size N shows the configured one; give one of the two"
        )
    return own, rest


def _hardware(own: argparse.Namespace) -> Hardware:
    if (own.gpu is None) == (own.hardware is None):
        raise ConfigError("the accelerator is missing: give --gpu NAME (such as h100) or --hardware FILE")
    return hardware_named(own.gpu) if own.hardware is None else read_hardware(own.hardware)


def _objective(own: argparse.Namespace, hardware: Hardware) -> Objective:
    price = hardware.price_per_hour if own.price is None else own.price
    for flag, value in (("--price", price), ("--tokens-per-second", own.tokens_per_second)):
        if value is not None and not value > 0:
            raise ConfigError(f"{flag} {value} must be above 0")
    if own.objective == "cost" and price is None:
        raise ConfigError(
            "--objective cost needs the price of one accelerator and hour: give --price P, or price_per_hour in a "
            "--hardware file"
        )
    if own.objective == "time" and (own.price is not None or own.tokens_per_second is not None):
        raise ConfigError(
            "--price and --tokens-per-second belong to --objective gpus or cost; they have no effect on the "
            "fastest step"
        )
    return Objective(own.objective, own.tokens_per_second, price)


def _write(path: Path, loaded: LoadedConfig, winner: Candidate) -> None:
    try:
        path.write_text(to_yaml(winner.layout.applied_to(loaded.config)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error}") from None

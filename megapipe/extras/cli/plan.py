"""`megapipe plan` and `progress`: a configuration's plan, the search for a layout, and the step of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megapipe.assembly.datasets import planned, unread_remarks, with_vocabulary
from megapipe.checkpoint.folder import find_checkpoint
from megapipe.config.config import Config
from megapipe.config.flags import normalised
from megapipe.config.gpu import shared_bytes
from megapipe.config.load import load_config
from megapipe.config.rules.gpu import own_kernels
from megapipe.config.yaml_file import to_yaml
from megapipe.environment import read_ranks_per_gpu
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.frame import PREDICTION_OPTIONS, command, hardware_given, option, switch, write_file
from megapipe.extras.report.folder import logged_load
from megapipe.extras.report.goodput import HOUR, MOST, Failures, checkpoint_bytes, days_text, parse_tokens, run_days
from megapipe.extras.report.grid import context_svg, grid_svg, schedule_svg
from megapipe.extras.report.step_time import step_text, terms_text
from megapipe.extras.search.experiments import experiments
from megapipe.extras.search.fit import Fit, fit_of, with_remedies
from megapipe.extras.search.layout import has_values
from megapipe.extras.search.search import OBJECTIVES, Objective, as_configured, choose
from megapipe.extras.search.search_report import SearchReport, megatron_text
from megapipe.extras.streams.roofline import roofline_text
from megapipe.plan.expert_load import BALANCED, ExpertLoad
from megapipe.plan.hardware import Hardware
from megapipe.plan.report import plan_text
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step
from megapipe.plan.world_rules import rules_of_world

DAYS_OPTIONS = (
    option("--gpu-hours-per-failure", "of the job: GPUs x hours over its failures", type=float, above=0),
    option("--restart-seconds", "from a failure to the first step after it", type=float, above=0),
    option("--save-seconds", "of writing a checkpoint", type=float, above=0),
    option("--storage-bytes-per-second", "of all ranks, in place of --save-seconds", type=float, above=0),
    option("--watts", "of an accelerator with its part of node and cooling, for MWh", type=float, above=0),
)
OPTIONS = (
    option("--svg", "write a drawing of the grid: every rank with the part of the model that it holds", type=Path),
    option(
        "--context-svg",
        "write a drawing of context parallelism: the tokens, heads and blocks of attention of each cp rank",
        type=Path,
    ),
    option("--schedule-svg", "write a drawing of the pipeline schedule, to the scale of its stages' FLOPs", type=Path),
    option(
        "--estimator",
        "megatron: also print Megatron-LM's estimate of the memory",
        choices=("megapipe", "megatron"),
        default="megapipe",
    ),
    option(
        "--ranks-per-gpu",
        "with --gpu or --hardware: say whether the plan fits where so many ranks share each GPU (docs/gpu.md)",
        type=int,
        above=0,
    ),
    switch(
        "--roofline",
        "with --gpu or --hardware: also count the kernels of each kind of layer and of a step on a fake device, and "
        "print them with the time that they would take; needs torch and g++",
    ),
    switch(
        "--explain",
        "with --gpu or --hardware: print the seconds of each term of the predicted step, and where they come from",
    ),
    option(
        "--expert-imbalance",
        "give memory and time where the fullest expert-parallel rank gets N times the mean of rows (default: 1, "
        "balanced), or for the load that a run logged: its metrics file or folder",
        metavar="N|FILE",
    ),
    "search, with --gpus N and one of --gpu and --hardware",
    option("--gpus", "search for a layout on N accelerators", type=int, above=0),
    *PREDICTION_OPTIONS,
    option(
        "--objective",
        "time: the fastest step on N accelerators (default); gpus: the fewest up to N that fit, or that reach "
        "--tokens-per-second; cost: the cheapest tokens on N, N / 2, ...",
        choices=OBJECTIVES,
    ),
    option("--price", "of an accelerator and hour, for the objective cost and for --days", type=float, above=0),
    option("--tokens-per-second", "to reach, for the objectives gpus and cost", type=float, above=0),
    option("--output", "write the best layout as a configuration", type=Path),
    switch("--json", "print everything as JSON, also of a plan of --world-size N with --gpu or --hardware"),
    "days of a run with failures, with --world-size N or --gpus N",
    option("--days", "of TOKENS (15.6T), or of --train-iters or -samples", nargs="?", const="", metavar="TOKENS"),
    *DAYS_OPTIONS,
)


@command("megapipe plan", OPTIONS, takes_config=True)
def main(own: argparse.Namespace) -> int:
    """Show what a configuration will do on a number of ranks, or search for a layout.

      megapipe plan --world-size 16384 --ranks-per-node 8 --config configs/llama3_405b.yaml

    shows the grid with its nodes, the layers and parameters of each stage and their sum, batch, FLOPs, the expected
    bubble and the memory of every rank; or why it cannot run. It is pretrain_gpt.py --plan, but data, length and
    learning rate may be omitted. --ranks-per-node: by default all ranks are on one node. With --gpu or --hardware the
    nodes are those of the hardware, and the predicted time of a step is shown, with experts that of their all-to-alls,
    and whether the fullest rank fits; if not, changes that fit, and exit code 1.

      megapipe plan --gpus 1024 --gpu a100-80 --config configs/gpt3_175b.yaml --output best.yaml

    searches for a layout and predicts its step time and memory; see docs/planner.md. Parallel sizes (those of experts
    too), the kind of context parallelism, schedule, microbatch, recompute, sequence parallelism, distributed optimizer
    and partition that are given as flags are kept, those in a YAML file are not.

    --days 15.6T prints how long a run of so many tokens takes with failures, checkpoints and restarts, what it costs,
    and the best --save-interval; see docs/planner.md. The rate of failures has no default. Published: a failure in
    50,700 GPU hours of Llama 3 on H100 (arXiv:2407.21783), in 29,500 and 82,100 of two clusters of A100
    (arXiv:2410.21680).
    """
    hardware = hardware_given(own)
    _check_days(own, hardware)
    if own.ranks_per_gpu is not None:
        hardware = _shared(own, hardware)
    if (own.roofline or own.explain) and (hardware is None or own.gpus is not None):
        flag = "--roofline" if own.roofline else "--explain"
        raise ConfigError(f"{flag} is for --world-size N ranks with one of --gpu NAME and --hardware FILE")
    if own.gpus is not None or (hardware is not None and not own.roofline and "--world-size" not in _names(own.flags)):
        if drawings := _drawings(own):
            raise ConfigError(f"{drawings[0][1]} draws a plan of --world-size N; leave it out of a search")
        return _search(own)
    search = {"--objective": own.objective, "--tokens-per-second": own.tokens_per_second, "--output": own.output}
    search |= {"--price": own.price if own.days is None else None}
    search |= {"--json": own.json or None} if hardware is None else {}
    if idle := [flag for flag, value in search.items() if value is not None]:
        raise ConfigError(f"{idle[0]} belongs to the search for a layout: add --gpus N and --gpu NAME")
    loaded = load_config(["--plan", *own.flags], is_job=False, more=rules_of_world)
    if loaded.requests.world_size is None:
        raise ConfigError("megapipe plan needs --world-size N, the number of ranks to plan for")
    num_ranks, per_node = loaded.requests.world_size, loaded.requests.ranks_per_node
    read_ranks_per_gpu(str(own.ranks_per_gpu or 1), per_node or num_ranks)
    if hardware is not None and per_node is None and num_ranks > hardware.ranks_per_node:
        per_node = hardware.on(num_ranks).ranks_per_node
    plan = planned(loaded, num_ranks, per_node)
    load = expert_load_given(own, plan.config, plan.topology.ep)
    plan = dataclasses.replace(plan, expert_load=load)
    fit = None if hardware is None else fit_of(plan, hardware)
    if fit is not None and own.ranks_per_gpu is None:
        fit = with_remedies(with_vocabulary(loaded.config), plan, fit.hardware)
    if own.json and hardware is not None and fit is not None:
        print(json.dumps(_plan_data(plan, hardware) | fit.data(), indent=2))
    else:
        remarks = *own_kernels(loaded.config), *unread_remarks(loaded.config.data)
        print("\n".join([*remarks, plan_text(plan)]))
        _print_more(own, plan, hardware, fit)
    return 0 if fit is None or fit.fits else 1


def _shared(own: argparse.Namespace, hardware: Hardware | None) -> Hardware:
    """Return what a rank has of the accelerator with --ranks-per-gpu. Raises ConfigError where a time is asked for."""
    flag = f"--ranks-per-gpu {own.ranks_per_gpu}"
    if hardware is None or own.gpus is not None:
        raise ConfigError(f"{flag} divides a GPU's memory: give --world-size N and one of --gpu and --hardware")
    timed = {"--roofline": own.roofline, "--explain": own.explain, "--json": own.json, "--days": own.days is not None}
    if given := [name for name, is_given in timed.items() if is_given]:
        raise ConfigError(f"{given[0]}: times of ranks that share a GPU mean nothing; leave out {given[0]} or {flag}")
    share, name = shared_bytes(hardware.memory_bytes, own.ranks_per_gpu), f"1/{own.ranks_per_gpu} of {hardware.name}"
    # NCCL then speaks over sockets, with buffers in the host's memory (src/transport/net.cc of NCCL 2.28.9)
    return dataclasses.replace(hardware, name=name, memory_bytes=share, nccl_bytes=0)


def _print_more(own: argparse.Namespace, plan: RunPlan, hardware: Hardware | None, fit: Fit | None) -> None:
    """Print what is predicted of a plan, write its drawings, and print Megatron's estimate, as far as is asked for."""
    if hardware is not None and fit is not None:
        fits, *ways_out = fit.lines()
        if own.ranks_per_gpu is None:
            print("\n".join([step_text(plan, hardware), *([terms_text(plan, hardware)] if own.explain else [])]))
        else:
            ways_out.clear()  # none was planned, as they are ordered by their times
        print("\n".join(f"           {line}" for line in (fits, *ways_out)))
        if own.days is not None:
            print(days_text(_days(own, plan, hardware, predict_step(plan, hardware).seconds)))
        if own.roofline:
            per_node = plan.topology.ranks_per_node
            nodes = [] if per_node is None else ["--ranks-per-node", str(per_node)]
            print(roofline_text([*own.flags, *nodes], hardware))
    for path, flag, draw in _drawings(own):
        write_file(path, draw(plan), flag)
        print(f"written: {path}")
    if own.estimator == "megatron":
        print(megatron_text(plan))


def _drawings(own: argparse.Namespace) -> list[tuple[Path, str, Callable[[RunPlan], str]]]:
    """Return the drawings that are asked for: path, flag, and what draws a plan."""
    known = (own.svg, "--svg", grid_svg), (own.context_svg, "--context-svg", context_svg)
    return [each for each in (*known, (own.schedule_svg, "--schedule-svg", schedule_svg)) if each[0] is not None]


def _plan_data(plan: RunPlan, hardware: Hardware) -> dict[str, Any]:
    """Return the predicted step of a plan as JSON data."""
    time = predict_step(plan, hardware)
    sizes = {name: getattr(plan.topology, name) for name in ("world_size", "tp", "cp", "pp", "dp", "ep")}
    seconds = {"step_seconds": time.seconds, "seconds_by_part": dict(time.parts)}
    rates = {"tokens_per_second": time.tokens_per_second, "mfu": time.mfu}
    return {**sizes, "schedule": plan.schedule_name, "gpu": hardware.name, **seconds, **rates}


def _search(own: argparse.Namespace) -> int:
    """Search, print and return the exit code, 1 if nothing fits. Raises ConfigError."""
    if own.gpus is None:
        raise ConfigError("a search needs --gpus N, the number of accelerators, 1 or more")
    if _names(own.flags) & {"--world-size", "--ranks-per-node"}:
        raise ConfigError("--gpus N searches for a layout, --world-size N shows the configured; give one of the two")
    hardware = hardware_given(own)
    if hardware is None:
        raise ConfigError("the accelerator is missing: give --gpu NAME (such as h100) or --hardware FILE")
    objective = _objective(own, hardware)
    loaded = load_config(["--plan", *own.flags], is_job=False)
    config = with_vocabulary(loaded.config)
    if config.offload.cpu_offloading_num_layers:
        raise ConfigError(
            f"--cpu-offloading-num-layers {config.offload.cpu_offloading_num_layers}: the search does not vary it and "
            "compares layouts without; leave it out, and add it to the one that is found (--plan shows what it saves)"
        )
    pinned = {key for key, origin in loaded.origins.items() if origin.startswith("flag ")}
    load = expert_load_given(own, config, own.gpus)
    found, tried = choose(
        config, own.gpus, hardware, objective, lambda layout: has_values(layout, config, pinned), load
    )
    configured = as_configured(config, found.num_gpus, hardware, load)
    here = hardware.on(found.num_gpus)
    to_run = tuple(experiments(found, loaded.config, own.flags, here))
    report = SearchReport(found, tried, objective, here, configured, own.estimator == "megatron", to_run)
    wanted = found.best[:1] if own.days is not None else ()
    days = [_days(own, best.plan, here, best.time.seconds) for best in wanted]
    more = {"days": days[0]} if days else {}
    print(json.dumps(report.data() | more, indent=2) if own.json else "\n".join([report.text(), *map(days_text, days)]))
    if not found.best:
        return 1
    if own.output is not None:
        write_file(own.output, to_yaml(found.best[0].layout.applied_to(loaded.config)), "--output")
        if not own.json:
            print(f"written: {own.output}, to run with pretrain_gpt.py --config {own.output}")
    return 0


def _names(flags: Sequence[str]) -> set[str]:
    """Return the names of the flags that are given."""
    return {normalised(word.partition("=")[0]) for word in flags}


def _check_days(own: argparse.Namespace, hardware: Hardware | None) -> None:
    """Raise ConfigError unless --days has all options that it needs, and these have --days."""
    names = [each.names[0] for each in DAYS_OPTIONS]
    values = {name: getattr(own, name[2:].replace("-", "_")) for name in [*names, "--price"]}
    given = [name for name in names if values[name] is not None]
    if own.days is None:
        if given:
            raise ConfigError(f"{given[0]} belongs to --days; add --days TOKENS, or leave it out")
        return
    missing = [name for name in names[:2] if name not in given]
    missing += ["one of " + " and ".join(names[2:4])] if len({*names[2:4]} & {*given}) != 1 else []
    missing += ["--gpu or --hardware"] if hardware is None else []
    if missing:
        raise ConfigError(f"--days needs {', '.join(missing)}; see docs/planner.md")
    for name, value in values.items():
        if value is not None and not 1 / MOST <= value <= MOST:
            raise ConfigError(f"{name} {value:g}: expected {1 / MOST:g} to {MOST:g}")
    parse_tokens(own.days or "0")


def _days(own: argparse.Namespace, plan: RunPlan, hardware: Hardware, step_seconds: float) -> dict[str, Any]:
    """Return the days of a run of the plan. Raises ConfigError."""
    size, of_rank = checkpoint_bytes(plan)
    saving, copying = own.save_seconds or size / own.storage_bytes_per_second, of_rank / hardware.host_bytes_per_second
    between = own.gpu_hours_per_failure * HOUR / plan.topology.world_size
    # with --async-save training waits for the copy to the host only
    save = (copying, saving) if plan.config.checkpoint.async_save else (saving, 0.0)
    failures = Failures(between, own.restart_seconds, *save)
    tokens = parse_tokens(own.days) if own.days else plan.config.training.train_samples * plan.config.model.seq_length
    return run_days(plan, step_seconds, tokens, failures, _price(own, hardware), own.watts)


def _price(own: argparse.Namespace, hardware: Hardware) -> float | None:
    """Return the price of an accelerator and hour, None if there is none."""
    return hardware.price_per_hour if own.price is None else own.price  # type: ignore[no-any-return]


def _objective(own: argparse.Namespace, hardware: Hardware) -> Objective:
    kind, price = own.objective or OBJECTIVES[0], _price(own, hardware)
    if kind == "cost" and price is None:
        raise ConfigError("--objective cost needs the price: give --price P, or price_per_hour in a --hardware file")
    if kind == "time" and ((own.price is not None and own.days is None) or own.tokens_per_second is not None):
        raise ConfigError("--price and --tokens-per-second belong to --objective gpus or cost, --price also to --days")
    return Objective(kind, own.tokens_per_second, price)


def expert_load_given(own: argparse.Namespace, config: Config, ep: int) -> ExpertLoad:
    """Return the load of --expert-imbalance, that of balanced routing without it. ep: the most. Raises ConfigError."""
    given = own.expert_imbalance
    if given is None:
        return BALANCED
    if own.roofline or config.recompute.recompute_memory_budget is not None:
        other = "--roofline" if own.roofline else "--recompute-memory-budget"
        raise ConfigError(f"--expert-imbalance {given}: {other} counts balanced routing; leave one of the two out")
    try:
        load = ExpertLoad(float(given))
    except ValueError:
        _, by_layer = logged_load(Path(given))
        load = ExpertLoad(of_layers=tuple((int(layer), tuple(loads)) for layer, loads in by_layer.items()))
    if problem := load.problem(config.model, ep):
        raise ConfigError(f"--expert-imbalance {given}: {problem}")
    return load


@command("megapipe progress", (), takes_config=True)
def progress(own: argparse.Namespace) -> None:
    """Print the step of the newest complete checkpoint in --save, and the last step of the run on --world-size N ranks,
    for job scripts; exit with 2 and an error message if the run is impossible. Starts nothing, writes nothing, needs no
    torch.

      megapipe progress --world-size 8 --config configs/quickstart.yaml --save runs/one
      step 40 of 100, runs/one/step_00000040
    """
    loaded = load_config(["--plan", *own.flags], more=rules_of_world)
    if loaded.requests.world_size is None:
        raise ConfigError("megapipe progress needs --world-size N, the number of ranks of the run")
    config = planned(loaded, loaded.requests.world_size, loaded.requests.ranks_per_node).config
    total, save = config.training.train_iters, config.checkpoint.save
    if not total:
        raise ConfigError("the run has no last step: give --train-iters or --train-samples")
    step, where = 0, "nothing is saved without --save"
    if save is not None:
        where = f"no checkpoint in {save} yet"
        try:
            if (found := find_checkpoint(Path(save))) is not None:
                step, where = found.step, str(found.path)
        except CheckpointError as error:
            # only damaged checkpoints: no progress; training reports what to do about them
            where = str(error).replace("\n", " ")
    print(f"step {step} of {total}, {where}")

"""`megapipe explain FLAG`: explain a flag, its cost in memory and time for a configuration, and its paper.

Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapipe.config.config import Config
from megapipe.config.fields import TAKES_VALUE, ConfigField, Flag, value_text
from megapipe.config.flags import REQUESTS, field_flags, normalised, suggestion, unit_and_help
from megapipe.config.load import LoadedConfig, load_config
from megapipe.config.megatron_flags import DELIBERATE_DIFFERENCES, SUPPORTED, megatron_flags
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli.pretrain import with_vocabulary
from megapipe.extras.search.explain import Alternative, Cost, alternatives, has_effect, papers
from megapipe.formatting import bytes_text, text_table
from megapipe.plan.hardware import Hardware, hardware_named, read_hardware
from megapipe.plan.schedule_choice import SCHEDULE_NAMES

HELP = """\
usage: megapipe explain FLAG [--gpu NAME | --hardware FILE] [--world-size N] [--ranks-per-node M] [--config FILE.yaml]
                             [other flags]

  megapipe explain --sequence-parallel --config configs/llama3_70b.yaml --world-size 64

What the flag does, what Megatron means by it, who reads it and the paper; with a configuration also its cost: memory of
the fullest pipeline rank, predicted step time and expected bubble with the flag's other values, or why they are
refused. Default: --gpu h100, and the least world that the configuration runs on.
"""
MOST_COLUMNS = 100


def main(arguments: Sequence[str]) -> int:
    """Explain one flag and return the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h",) or words == ["--help"]:
        print(HELP, end="")
        return 0 if words else 2
    try:
        print(explained(words[0], words[1:]))
    except MegapipeError as error:
        print(f"megapipe explain: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def explained(word: str, rest: Sequence[str]) -> str:
    """rest: hardware, world and configuration.

    Raises ConfigError for an unknown flag, or for a configuration that cannot be read.
    """
    name = normalised(word if word.startswith("--") else "--" + word)
    if name in REQUESTS:
        return f"{name}  [megapipe]\n  {REQUESTS[name].help}\n  It is a request, not a setting of the run."
    if name in field_flags():
        field, flag = field_flags()[name]
        return "\n".join([*_words(name, field, flag), *_costs(field, rest)])
    if name in megatron_flags():
        row = megatron_flags()[name]
        return f"{name}  a flag of Megatron-LM, {row.kind}\n  {row.note}"
    raise ConfigError(f"{name} is not a flag{suggestion(name)} (docs/flags.md lists all)")


def _words(name: str, field: ConfigField, flag: Flag) -> Iterator[str]:
    row = megatron_flags().get(name)
    is_megatrons = row is not None and row.kind == SUPPORTED
    yield f"{name}  {'as in Megatron-LM' if is_megatrons else '[megapipe]'}, sets {field.key}"
    if flag.value is not TAKES_VALUE:
        yield f"  sets it to {value_text(flag.value)}{'; ' + flag.help if flag.help else ''}"
    yield f"  {unit_and_help(field, SCHEDULE_NAMES)}"
    for difference in DELIBERATE_DIFFERENCES:
        if difference.flag in (name, field.main_flag):
            yield f"  Megatron: {difference.megatron}; here: {difference.here}, because {difference.reason}"
    paper = papers().get(name) or papers().get(field.main_flag)
    if paper:
        yield f"  paper: {paper}"


def _costs(field: ConfigField, rest: Sequence[str]) -> Iterator[str]:
    own, flags = _own_flags(rest)
    if not flags:
        yield "  cost: give a configuration (--config FILE, or flags) to see it"
        return
    hardware = hardware_named(own.gpu or "h100") if own.hardware is None else read_hardware(own.hardware)
    loaded = load_config(["--plan", *flags], is_job=False)
    config = with_vocabulary(loaded.config)
    found = alternatives(field, config, _world_size(loaded, config), loaded.requests.ranks_per_node, hardware)
    yield from _table(found, hardware, _world_size(loaded, config))


def _table(found: list[Alternative], hardware: Hardware, world_size: int) -> Iterator[str]:
    current = found[0].cost
    if isinstance(current, str):
        raise ConfigError(f"the configuration itself cannot run on {world_size} ranks: {current}")
    if len(found) == 1:
        yield "  cost: unknown to the model of memory and time; its values are not compared"
        return
    if not has_effect(found) and all(isinstance(alternative.cost, Cost) for alternative in found):
        values = ", ".join(alternative.value for alternative in found)
        yield f"  cost: none in memory or time, by the plan's model ({values} compared)"
        return
    yield f"  cost on {world_size} x {hardware.name}, by the plan's model (docs/planner.md):"
    rows: list[tuple[str, ...]] = [("value", "fullest rank", "step", "", "bubble")]
    rows += [_row(alternative, current) for alternative in found if isinstance(alternative.cost, Cost)]
    yield from text_table(rows, indent=4)
    for alternative in found:
        if isinstance(alternative.cost, str):
            yield f"    {alternative.value} is refused: {alternative.cost}"
    if current.seconds is None:
        yield f"    no step time: {hardware.name} has no matrix rate for this dtype; give --hardware FILE, or --bf16"


def _row(alternative: Alternative, current: Cost) -> tuple[str, ...]:
    cost = alternative.cost
    assert isinstance(cost, Cost)
    seconds = "unknown" if cost.seconds is None else f"{cost.seconds:.4g} s"
    change = "as it is" if alternative.is_current else ""
    if not change and cost.seconds is not None and current.seconds:
        change = f"{cost.seconds / current.seconds - 1:+.1%}"
    value = alternative.value if len(alternative.value) < MOST_COLUMNS else alternative.value[:MOST_COLUMNS] + "..."
    return value, bytes_text(max(cost.rank_bytes)), seconds, change, f"{cost.bubble_share:.1%}"


def _world_size(loaded: LoadedConfig, config: Config) -> int:
    parallel = config.parallel
    return loaded.requests.world_size or parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size


def _own_flags(rest: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="megapipe explain", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu")
    parser.add_argument("--hardware", type=Path)
    own, flags = parser.parse_known_args(list(rest))
    if own.gpu is not None and own.hardware is not None:
        raise ConfigError("--gpu and --hardware both give the accelerator; give one of the two")
    return own, flags

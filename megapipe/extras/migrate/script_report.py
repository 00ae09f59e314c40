"""The report of a launch script: its flags, the grid and its memory, and what makes an impossible grid possible."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megapipe.assembly.datasets import missing_files
from megapipe.config.config import Config
from megapipe.config.flags import normalised
from megapipe.config.rules.training import with_implied
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.migrate.judge import Judgement, Migration, World, judge, launcher_of, world_of
from megapipe.extras.migrate.shell_script import SCRIPT_NAME, Call, Reading, read_script
from megapipe.extras.migrate.yaml_script import read_yaml
from megapipe.extras.search.fit import fit_of, with_remedies
from megapipe.formatting import bytes_text, grid_text
from megapipe.input_files import MOST_BYTES, regular
from megapipe.plan.hardware import HARDWARE, Hardware
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.sharded import BF16_BYTES
from megapipe.plan.world_rules import batch_of

SOME_VOCABULARY = 50_257  # of GPT-2, where only a tokenizer defines it: only whether the grid is possible is asked


def migration_of(
    words: Sequence[str], given: Sequence[tuple[str, str]], ranks: int | None, hardware: Hardware | None
) -> Migration:
    """Return the report of what a user names. Raises ConfigError.

    words: arguments of pretrain_gpt.py, perhaps with its launcher; or a script, - for standard input, and the arguments
    of the script. given: variables of its environment. ranks: instead of those of the launcher.
    """
    at = next((at for at, word in enumerate(words) if SCRIPT_NAME.fullmatch(word)), None)
    if words[0].startswith("--") or at is not None:
        launcher = () if at is None else tuple(words[:at])
        arguments = tuple(words if at is None else words[at + 1 :])
        call = Call(0, launcher, "pretrain_gpt.py", arguments, frozenset())
        return report_of("the command line", Reading([call]), ranks, hardware)
    if words[0] == "-":
        return reported(sys.stdin.read(), "standard input", words[1:], given, ranks, hardware)
    path = Path(words[0])
    try:
        text = regular(path, MOST_BYTES).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = f"{error.strerror}; give the script, or -- and arguments"
        raise ConfigError(f"{path} cannot be read: {why}") from None
    return reported(text, words[0], words[1:], given, ranks, hardware)


def reported(
    text: str,
    source: str,
    words: Sequence[str] = (),
    given: Sequence[tuple[str, str]] = (),
    ranks: int | None = None,
    hardware: Hardware | None = None,
) -> Migration:
    """Return the report of the text of a script. words: its arguments; given: variables of its environment."""
    if source.endswith((".yaml", ".yml")):
        return report_of(source, read_yaml(text, Path(source), dict(given)), ranks, hardware)
    reading = read_script(text, source, words, given)
    if not reading.calls:
        why = "".join(f"; {note}" for note in reading.notes)
        raise ConfigError(f"{source} has no call of pretrain_gpt.py{why}; give its arguments: megapipe migrate --")
    migration = report_of(source, reading, ranks, hardware)
    if ranks is not None or not migration.grid_problems:
        return migration

    def again(name: str, value: int) -> tuple[str, tuple[str, ...]]:
        reading = read_script(text, source, words, [*given, (name, str(value))])
        call = reading.calls[0]
        return grid(judge(call.arguments), world_of(call.launcher, reading.variables))[:2]

    return dataclasses.replace(migration, ways=tuple(possible_ways(migration, reading, again)))


def report_of(source: str, reading: Reading, ranks: int | None, hardware: Hardware | None = None) -> Migration:
    """Return the report of the first call of a script."""
    call = reading.calls[0]
    judgement = judge(call.arguments)
    world = world_of(call.launcher, reading.variables)
    notes = list(reading.notes)
    if ranks is not None and ranks != world.size:
        launcher = launcher_of(call.launcher, ranks)
        if launcher is None:
            notes.append(f"how many ranks the launcher starts is not known: make it start {ranks}")
        call = dataclasses.replace(call, launcher=launcher or call.launcher)
        world = World(ranks, world_of(call.launcher, {}).ranks_per_node, "as asked")
    said, problems, plan = grid(judgement, world)
    # conditions that hold, or whose outcome is assumed
    decisions = tuple(each for each in reading.decisions if each.names & call.names and each.outcome != "not taken")
    notes += [f"line {each.line}: {each.script} is started once more" for each in reading.calls[1:]]
    files = () if judgement.loaded is None else missing_files(judgement.loaded.config.data)
    missing = tuple((flag, path) for flag, path in files if "$" not in path)  # others are not known
    migration = Migration(source, call, judgement, decisions, tuple(notes), said, problems, missing)
    if plan is None or judgement.loaded is None:
        return migration
    config, judgement, fit = judgement.loaded.config, with_costs(judgement, plan), None
    lines = [memory_text(plan)]
    if hardware is not None:
        fit = with_remedies(_planned_config(config), plan, hardware)
        lines = list(fit.lines())
    if config.model.vocab_size is None:
        lines[0] += f" (with a vocabulary of {SOME_VOCABULARY:,})"
    data = None if fit is None else fit.data()
    return dataclasses.replace(migration, judgement=judgement, memory=tuple(lines), fit=data)


def _planned_config(config: Config) -> Config:
    """Return the configuration with some vocabulary, and with a constant batch: the full one.

    One schedule, not one for each size of a ramp: in a deep pipeline those take a minute.
    """
    config = with_implied(config)
    size = config.training.global_batch_size
    training = config.training if size is None else config.training.with_batch(size)
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or SOME_VOCABULARY)
    return dataclasses.replace(config, model=model, training=training)


def grid(judgement: Judgement, world: World) -> tuple[str, tuple[str, ...], RunPlan | None]:
    """Return the ranks and the grid in words, why the configuration cannot run on them, and its plan if it can."""
    if judgement.loaded is None or judgement.unchecked:
        return f"{world.size or 'not stated'} {world.origin}; the grid is not checked", (), None
    config = judgement.loaded.config
    size = world.size or least_ranks(config)
    said = f"{size} {world.origin}" if world.size else f"not stated by the launcher; checked on {size}, the least"
    try:
        plan = resolve(_planned_config(config), size, world.ranks_per_node)
        num_sizes = len(batch_of(with_implied(config), plan.topology).sizes)
    except MegapipeError as error:
        return said, tuple(str(error).splitlines()), None
    axes = plan.topology
    later = "; schedules of the smaller batches are checked at start" if num_sizes > 1 else ""
    return f"{said}: {grid_text(axes.tp, axes.pp, axes.dp, axes.cp)}{later}", (), plan


def least_ranks(config: Config) -> int:
    """Return the ranks of one data-parallel replica, or of as many as hold all experts."""
    parallel = config.parallel
    tp, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    of_experts = 1 if config.model.num_experts is None else experts * (parallel.expert_tensor_parallel_size or tp)
    return math.lcm(tp * parallel.context_parallel_size, of_experts) * parallel.pipeline_model_parallel_size


def possible_ways(
    migration: Migration, reading: Reading, again: Callable[[str, int], tuple[str, tuple[str, ...]]]
) -> Iterator[str]:
    """Yield options of the command with which the grid is possible: --set of a variable that has a default, --ranks.

    again: returns the grid and its problems with a variable.
    """
    loaded = migration.judgement.loaded
    if loaded is None or migration.judgement.unchecked:
        return
    per_node = world_of(migration.call.launcher, reading.variables).ranks_per_node or 1
    size = math.lcm(least_ranks(loaded.config), per_node)
    said, problems, _ = grid(migration.judgement, World(size, per_node if size > per_node else None, "ranks"))
    if problems:
        return
    for name, default in reading.defaults.items():
        for value in (size // per_node, size) if default.isdecimal() else ():
            with_it, its_problems = again(name, value)
            if not its_problems:
                yield f"--set {name}={value} ({with_it})"
                break
    yield f"--ranks {size} ({said})"


def memory_text(plan: RunPlan) -> str:
    """Return what the fullest rank needs, and the GPUs of the table that have it, in words."""
    most = fit_of(plan, HARDWARE["h100"])
    fitting = [name for name, hardware in HARDWARE.items() if most._replace(hardware=hardware).fits]
    on = f"fits {', '.join(fitting)}" if fitting else "fits none of the GPUs of the table"
    need = f"pp_rank {most.pp_rank} needs {bytes_text(most.needed_bytes)} with NCCL"
    return f"{need}; {on}; --gpu NAME says by how much, or what would fit"


def with_costs(judgement: Judgement, plan: RunPlan) -> Judgement:
    """Return the judgement with what memory flags cost here that save it in Megatron, in the notes of their rows."""
    items = max(all_rank_memory(plan), key=lambda rank: rank.device_bytes).items
    notes = {}
    if plan.shape.gradient_dtype != "bf16" and plan.shape.gradient > BF16_BYTES:
        sums, half = items["gradients"], items["gradients"] * BF16_BYTES // plan.shape.gradient
        notes["--grad-reduce-in-bf16"] = (
            f"but gradients are summed in fp32, {bytes_text(sums)} on a rank and {bytes_text(items['reduction'])} for "
            f"their bf16 copies; Megatron's sums in bf16 take {bytes_text(half)}, as here with "
            "--use-precision-aware-optimizer --main-grads-dtype bf16"
        )
    if copies := items["fp8 weights"]:
        notes["--fp8-param-gather"] = (
            f"8-bit copies take {bytes_text(copies)} on a rank besides {bytes_text(items['weights'])} of weights in "
            "16 bits, of which Megatron keeps only those of other layers than fp8 linears"
        )
    rows = [
        dataclasses.replace(row, note="; ".join(filter(None, (row.note, notes.get(normalised(row.flag))))))
        for row in judgement.rows
    ]
    return dataclasses.replace(judgement, rows=tuple(rows))

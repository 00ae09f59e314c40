"""The report of a launch script: its flags, and its grid on the ranks of the launcher."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.assembly.datasets import missing_files
from megapipe.config.config import Config
from megapipe.config.rules.training import with_implied
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.migrate.judge import Judgement, Migration, World, judge, world_of
from megapipe.extras.migrate.shell_script import SCRIPT_NAME, Call, Reading, read_script
from megapipe.extras.migrate.yaml_script import read_yaml
from megapipe.formatting import grid_text
from megapipe.input_files import MOST_BYTES, regular
from megapipe.plan.resolve import resolve
from megapipe.plan.world_rules import batch_of

SOME_VOCABULARY = 50_257  # of GPT-2, where only a tokenizer defines it: only whether the grid is possible is asked


def migration_of(words: Sequence[str], given: Sequence[tuple[str, str]]) -> Migration:
    """Return the report of what a user names. Raises ConfigError.

    words: arguments of pretrain_gpt.py, perhaps with its launcher; or a script, - for standard input, and the arguments
    of the script. given: variables of its environment.
    """
    at = next((at for at, word in enumerate(words) if SCRIPT_NAME.fullmatch(word)), None)
    if words[0].startswith("--") or at is not None:
        launcher = () if at is None else tuple(words[:at])
        arguments = tuple(words if at is None else words[at + 1 :])
        call = Call(0, launcher, "pretrain_gpt.py", arguments, frozenset())
        return report_of("the command line", Reading([call]))
    if words[0] == "-":
        return reported(sys.stdin.read(), "standard input", words[1:], given)
    path = Path(words[0])
    try:
        text = regular(path, MOST_BYTES).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = f"{error.strerror}; give the script, or -- and arguments"
        raise ConfigError(f"{path} cannot be read: {why}") from None
    return reported(text, words[0], words[1:], given)


def reported(text: str, source: str, words: Sequence[str] = (), given: Sequence[tuple[str, str]] = ()) -> Migration:
    """Return the report of the text of a script. words: its arguments; given: variables of its environment."""
    if source.endswith((".yaml", ".yml")):
        return report_of(source, read_yaml(text, Path(source), dict(given)))
    reading = read_script(text, source, words, given)
    if not reading.calls:
        why = "".join(f"; {note}" for note in reading.notes)
        raise ConfigError(f"{source} has no call of pretrain_gpt.py{why}; give its arguments: megapipe migrate --")
    return report_of(source, reading)


def report_of(source: str, reading: Reading) -> Migration:
    """Return the report of the first call of a script."""
    call = reading.calls[0]
    judgement = judge(call.arguments)
    said, problems = grid(judgement, world_of(call.launcher, reading.variables))
    # conditions that hold, or whose outcome is assumed
    decisions = tuple(each for each in reading.decisions if each.names & call.names and each.outcome != "not taken")
    again = (f"line {each.line}: {each.script} is started once more" for each in reading.calls[1:])
    files = () if judgement.loaded is None else missing_files(judgement.loaded.config.data)
    missing = tuple((flag, path) for flag, path in files if "$" not in path)  # others are not known
    return Migration(source, call, judgement, decisions, (*reading.notes, *again), said, problems, missing)


def _planned_config(config: Config) -> Config:
    """Return the configuration with some vocabulary, and with a constant batch: the full one.

    One schedule, not one for each size of a ramp: in a deep pipeline those take a minute.
    """
    config = with_implied(config)
    size = config.training.global_batch_size
    training = config.training if size is None else config.training.with_batch(size)
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or SOME_VOCABULARY)
    return dataclasses.replace(config, model=model, training=training)


def grid(judgement: Judgement, world: World) -> tuple[str, tuple[str, ...]]:
    """Return the ranks and the grid in words, and why the configuration cannot run on them."""
    if judgement.loaded is None or judgement.unchecked:
        return f"{world.size or 'not stated'} by the launcher; the grid is not checked", ()
    config = judgement.loaded.config
    size = world.size or least_ranks(config)
    said = f"{size} by the launcher" if world.size else f"not stated by the launcher; checked on {size}, the least"
    try:
        plan = resolve(_planned_config(config), size, world.ranks_per_node)
        num_sizes = len(batch_of(with_implied(config), plan.topology).sizes)
    except MegapipeError as error:
        return said, tuple(str(error).splitlines())
    axes = plan.topology
    later = "; schedules of the smaller batches are checked at start" if num_sizes > 1 else ""
    return f"{said}: {grid_text(axes.tp, axes.pp, axes.dp, axes.cp)}{later}", ()


def least_ranks(config: Config) -> int:
    """Return the ranks of one data-parallel replica, or of as many as hold all experts."""
    parallel = config.parallel
    tp, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    of_experts = 1 if config.model.num_experts is None else experts * (parallel.expert_tensor_parallel_size or tp)
    return math.lcm(tp * parallel.context_parallel_size, of_experts) * parallel.pipeline_model_parallel_size

"""`megapipe migrate`: what every flag of a Megatron-LM launch script does here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli.frame import command, option, switch
from megapipe.extras.migrate.judge import (
    Judgement,
    Migration,
    World,
    json_report,
    judge,
    missing_files,
    text_report,
    world_of,
    written,
)
from megapipe.extras.migrate.shell_script import SCRIPT_NAME, Call, Reading, read_script
from megapipe.extras.migrate.yaml_script import read_yaml
from megapipe.input_files import MOST_BYTES, regular
from megapipe.plan.batch import batch_schedule
from megapipe.plan.resolve import resolve

SOME_VOCABULARY = 50_257  # of GPT-2, where only a tokenizer defines it: only whether the grid is possible is asked
OPTIONS = (
    option("--set", "a variable of the script's environment", metavar="NAME=VALUE", action="append", default=[]),
    option("--ranks", "check for N ranks, not those of the launcher", type=int, above=0),
    option("--write", "write the configuration here as YAML, with every decision as a comment", metavar="FILE"),
    switch("--json", "print everything as JSON"),
)


@command("megapipe migrate", OPTIONS, takes_config=True)
def main(own: argparse.Namespace) -> int:
    """Show what every flag of a Megatron-LM launch script does here; the script is parsed, never executed.

      megapipe migrate train_llama3.sh
      megapipe migrate train_gpt3.sh --set TP=8 --set PP=4 ARGUMENTS OF THE SCRIPT
      megapipe migrate -- --num-layers 32 --hidden-size 4096 ...
      megapipe migrate DeepSeek-V3.yaml --set TP=1 --set PP=16
      cat common.sh train.sh | megapipe migrate -

    Variables, arrays, arithmetic and conditions of the script are followed. What only a run shows ($(hostname), a
    variable that nothing sets) stays as it is and is named. Exit code 0: the script runs as it is, but perhaps for
    files that are not here; 1: something has to be changed; 2: no call of pretrain_gpt.py could be read.
    """
    if not own.flags:
        raise ConfigError("no script; give a file, - for standard input, or -- and the arguments of pretrain_gpt.py")
    given = []
    for text in own.set:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--set {text}: expected NAME=VALUE, a variable of the script")
        given.append((name, value))
    words: list[str] = own.flags
    at = next((at for at, word in enumerate(words) if SCRIPT_NAME.fullmatch(word)), None)
    if words[0].startswith("--") or at is not None:
        launcher = () if at is None else tuple(words[:at])
        arguments = tuple(words if at is None else words[at + 1 :])
        call = Call(0, launcher, "pretrain_gpt.py", arguments, frozenset())
        migration = report_of("the command line", Reading([call]), own.ranks)
    elif words[0] == "-":
        migration = reported(sys.stdin.read(), "standard input", words[1:], given, own.ranks)
    else:
        path = Path(words[0])
        try:
            text = regular(path, MOST_BYTES).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            why = f"{error.strerror}; give the script, or -- and arguments"
            raise ConfigError(f"{path} cannot be read: {why}") from None
        migration = reported(text, words[0], words[1:], given, own.ranks)
    if own.write is not None:
        text = written(migration)
        try:
            Path(own.write).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {own.write}: cannot be written: {error.strerror}") from None
    print(json.dumps(json_report(migration), indent=2) if own.json else "\n".join(text_report(migration)))
    return 0 if migration.runs else 1


def reported(
    text: str, source: str, words: Sequence[str] = (), given: Sequence[tuple[str, str]] = (), ranks: int | None = None
) -> Migration:
    """Return the report of the text of a script. words: its arguments; given: variables of its environment."""
    if source.endswith((".yaml", ".yml")):
        return report_of(source, read_yaml(text, Path(source), dict(given)), ranks)
    reading = read_script(text, source, words, given)
    if not reading.calls:
        why = "".join(f"; {note}" for note in reading.notes)
        raise ConfigError(f"{source} has no call of pretrain_gpt.py{why}; give its arguments: megapipe migrate --")
    return report_of(source, reading, ranks)


def report_of(source: str, reading: Reading, ranks: int | None) -> Migration:
    """Return the report of the first call of a script."""
    call = reading.calls[0]
    judgement = judge(call.arguments)
    world = world_of(call.launcher, reading.variables)
    ranks_text, problems = grid(judgement, World(ranks, None) if ranks is not None else world)
    # conditions that hold, or whose outcome is assumed
    decisions = tuple(each for each in reading.decisions if each.names & call.names and each.outcome != "not taken")
    further = [f"line {each.line}: {each.script} is started once more" for each in reading.calls[1:]]
    missing = () if judgement.loaded is None else tuple(missing_files(judgement.loaded.config, Path()))
    notes = (*reading.notes, *further)
    return Migration(source, call, judgement, decisions, notes, ranks_text, problems, missing)


def grid(judgement: Judgement, world: World) -> tuple[str, tuple[str, ...]]:
    """Return the ranks and the grid in words, and why the configuration cannot run on them."""
    if judgement.loaded is None or judgement.unchecked:
        return f"{world.size or 'not stated'} by the launcher; the grid is not checked", ()
    config = judgement.loaded.config
    parallel = config.parallel
    tp, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    of_experts = 1 if config.model.num_experts is None else experts * (parallel.expert_tensor_parallel_size or tp)
    replica = tp * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    # ranks of one data-parallel replica, or of as many as hold all experts
    least = math.lcm(tp * parallel.context_parallel_size, of_experts) * parallel.pipeline_model_parallel_size
    size = world.size or least
    said = f"{size} by the launcher" if world.size else f"not stated by the launcher; checked on {size}, the least"
    training, rampup = config.training, config.training.rampup_batch_size
    # one schedule, not one for each size of a ramp: in a deep pipeline those take a minute
    constant = dataclasses.replace(training, rampup_batch_size=None)
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or SOME_VOCABULARY)
    try:
        plan = resolve(dataclasses.replace(config, model=model, training=constant), size, world.ranks_per_node)
        batch_schedule(training.global_batch_size, training.micro_batch_size, plan.topology.dp, rampup, replica)
    except MegapipeError as error:
        return said, tuple(str(error).splitlines())
    axes = plan.topology
    later = "; schedules of the smaller batches are checked at start" if rampup else ""
    return f"{said}: tp {axes.tp} x pp {axes.pp} x dp {axes.dp}{later}", ()

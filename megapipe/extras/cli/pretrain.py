"""`pretrain_gpt.py`: flags and YAML -> plan -> training, or one of --print-config, --plan, --dry-run, --verify-grid.

Invalid configurations are refused before torch is imported and any process group is created.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.assembly.datasets import planned, unread_remarks
from megapipe.checkpoint.changes import model_changes
from megapipe.checkpoint.folder import checkpoint_config, find_checkpoint, saved_tokenizer, vocabulary_of
from megapipe.config.config import Config
from megapipe.config.files import is_hugging_face
from megapipe.config.flags import Requests
from megapipe.config.load import LoadedConfig, load_config, with_checkpoint_model, with_tokenizer
from megapipe.config.rules.check import Rule, broken_rules
from megapipe.environment import Environment
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli.frame import run_on_ranks
from megapipe.monitor.signals import ended_by_signals, outlive_output
from megapipe.plan.report import plan_text
from megapipe.plan.schedule_choice import SCHEDULE_NAMES
from megapipe.plan.world_rules import world_rules
from megapipe.tokenizers.tokenizer import end_tokens

PRINTING = frozenset(("--help", "--plan", "--print-config"))  # requests that only print

if TYPE_CHECKING:
    from megapipe.assembly.datasets import RunData
    from megapipe.assembly.runtime import TrainingRuntime
    from megapipe.train.journal import Journal
    from megapipe.train.metrics import Observer


def main(argv: Sequence[str] | None = None) -> int:
    """Run pretraining on this rank and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    interrupted = "interrupted; the last checkpoint is complete, later steps are lost"
    outlive_output(tells_closed=PRINTING.isdisjoint(arguments))

    def run(environment: Environment) -> int:
        def rules(requests: Requests) -> tuple[Rule, ...]:
            return world_rules(*_world(requests, environment))

        loaded = load_config(arguments, schedules=SCHEDULE_NAMES, more=rules, if_refused=_compare(environment))
        return run_job(loaded, environment)

    with ended_by_signals():
        return run_on_ranks(run, interrupted)


def run_job(loaded: LoadedConfig, environment: Environment, observer: Observer | None = None) -> int:
    """Train with a loaded configuration, or do what it requests instead, and return the exit code."""
    requests, checkpoint, weights = loaded.requests, loaded.config.checkpoint, None
    world = _world(requests, environment)
    rules = world_rules(*world)
    if is_hugging_face(checkpoint.load):
        from megapipe.extras.convert.hugging_face import start_from

        loaded, weights = start_from(loaded, rules)
    elif loaded.takes_model:
        if checkpoint.load is None:
            raise ConfigError("--use-checkpoint-args takes the model from a checkpoint; give it with --load DIR")
        saved, folder = checkpoint_config(Path(checkpoint.load), checkpoint.ckpt_step)
        taker = "--use-checkpoint-args" if checkpoint.use_checkpoint_args else "--load"
        if loaded.is_bare:
            loaded = with_tokenizer(loaded, saved_tokenizer(folder, saved.data), str(folder))
        loaded = with_checkpoint_model(loaded, saved, str(folder), rules, taker)
    if requests.print_config:
        if environment.global_rank == 0:
            try:
                text = loaded.text(planned(loaded, *world).config)
            except ConfigError:  # without derived values if it does not fit this number of ranks
                text = loaded.text()
            print(text, end="")
        return 0
    if requests.dry_run and environment.is_distributed:
        raise ConfigError("--dry-run needs no other ranks: run it without torchrun or srun, with --world-size N")
    try:
        plan = planned(loaded, *world)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *broken_rules(loaded.config, _compare(environment))])) from None
    is_training = not (requests.plan or requests.dry_run or requests.verify_grid is not None)
    if environment.global_rank == 0 and not (loaded.config.logging.quiet and is_training):
        remarks = *loaded.remarks, *(unread_remarks(loaded.config.data) if requests.plan else ())
        print("\n".join([*remarks, plan_text(plan)]), flush=True)
    if requests.plan:
        return 0
    if requests.dry_run:
        from megapipe.extras.dry_run.run import dry_run

        return dry_run(plan, requests.rank)
    if requests.verify_grid is not None:
        from megapipe.extras.verify.parity import verify

        return verify(plan, environment, requests.verify_grid)
    from megapipe.extras.report.observer import ReportingObserver
    from megapipe.train.run import Job, pretrain

    text, observer = loaded.text(plan.config), observer or ReportingObserver()
    pretrain(Job(plan, environment, text, print_samples, loaded.remarks, weights, observer))
    return 0


def _compare(environment: Environment) -> tuple[Rule, ...]:
    """Return the comparison with the checkpoint's model, read by one rank, and only if the run is refused."""
    return (model_of_checkpoint,) if environment.global_rank == 0 else ()


def model_of_checkpoint(config: Config) -> Iterator[str]:
    """Yield how the model differs from the one in the checkpoint of --load, for a run that is refused anyway: layers
    that do not divide over the ranks may be layers that should be others.
    """
    checkpoint = config.checkpoint
    if checkpoint.load is None or checkpoint.use_checkpoint_args or checkpoint.allow_changed_model:
        return
    if config.model.head_size() < 1:  # refused by a rule on its own
        return
    try:
        folder = find_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step)
        if folder is None:
            return
        vocabulary = vocabulary_of(folder)  # this run's may be unknown yet
        found = model_changes(folder, dataclasses.replace(config.model, vocab_size=vocabulary))
    except MegapipeError:  # another model is not what is wrong
        return
    for line in found:
        yield f"{line} ({folder.path}); --use-checkpoint-args takes the model from there"


def _world(requests: Requests, environment: Environment) -> tuple[int, int | None]:
    """Return the number of ranks and of those on a node: the ranks that were started, or those of --world-size."""
    if requests.world_size is not None:
        return requests.world_size, requests.ranks_per_node
    return environment.world_size, environment.local_world_size


def print_samples(runtime: TrainingRuntime, data: RunData, journal: Journal) -> None:
    """Continue each of --sample-prompts after a run and print the texts. A collective: all ranks call it."""
    logging = runtime.plan.config.logging
    if not logging.sample_prompts:
        return
    if data.tokenizer is None:
        raise ConfigError("--sample-prompts needs a tokenizer: give --tokenizer-type")
    from megapipe.extras.inference.generate import Generator, Limits, Sampling

    prompts = [data.tokenizer.encode(text) for text in logging.sample_prompts]
    stop = frozenset(end_tokens(data.tokenizer))
    generator = Generator(runtime, Sampling(temperature=0.8, top_k=40))
    texts = generator.continue_prompts(prompts, Limits(logging.sample_tokens, stop))
    journal.say("samples:")
    for prompt, text in zip(prompts, texts, strict=True):
        journal.say("    " + data.tokenizer.decode([*prompt, *text]).replace("\n", "\n    "))

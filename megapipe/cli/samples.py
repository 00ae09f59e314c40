"""--sample-prompts: a few lines that the trained model writes, at the end of a run."""

from __future__ import annotations

from megapipe.build.datasets import RunData
from megapipe.build.machines import Machines
from megapipe.errors import ConfigError
from megapipe.inference.sample import Sampler
from megapipe.train.writers import Writers


def print_samples(machines: Machines, data: RunData, writers: Writers) -> None:
    """Continue each of --sample-prompts and print the texts; called by all ranks."""
    logging = machines.plan.config.logging
    if not logging.sample_prompts:
        return
    if data.tokenizer is None:
        raise ConfigError("--sample-prompts are texts: give the tokenizer that turns them into tokens with --tokenizer-type")
    prompts = [data.tokenizer.encode(text) for text in logging.sample_prompts]
    texts = Sampler(machines).continue_prompts(prompts, logging.sample_tokens, data.tokenizer.eod)
    writers.say("samples:")
    for text in texts:
        writers.say("    " + data.tokenizer.decode(text).replace("\n", "\n    "))

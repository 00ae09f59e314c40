"""--sample-prompts: texts that the trained model generates at the end of a run."""

from __future__ import annotations

from megapipe.assembly.datasets import RunData
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.errors import ConfigError
from megapipe.extras.inference.generate import Generator, Limits
from megapipe.extras.inference.sampling import Sampling
from megapipe.train.journal import Journal


def print_samples(runtime: TrainingRuntime, data: RunData, journal: Journal) -> None:
    """Continue each of --sample-prompts and print the texts. A collective: all ranks call it."""
    logging = runtime.plan.config.logging
    if not logging.sample_prompts:
        return
    if data.tokenizer is None:
        raise ConfigError("--sample-prompts needs a tokenizer: give --tokenizer-type")
    prompts = [data.tokenizer.encode(text) for text in logging.sample_prompts]
    stop = frozenset() if data.tokenizer.eod is None else frozenset({data.tokenizer.eod})
    generator = Generator(runtime, Sampling(temperature=0.8, top_k=40))
    texts = generator.continue_prompts(prompts, Limits(logging.sample_tokens, stop))
    journal.say("samples:")
    for prompt, text in zip(prompts, texts, strict=True):
        journal.say("    " + data.tokenizer.decode([*prompt, *text]).replace("\n", "\n    "))

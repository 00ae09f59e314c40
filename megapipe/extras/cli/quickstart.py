"""`megapipe quickstart`: from text on this machine to a small trained GPT."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.config.config import Config, fields_by_key
from megapipe.config.load import load_config
from megapipe.config.yaml_file import SUPPLIED
from megapipe.data.build_datasets import parse_split, sequence_range
from megapipe.data.indexed_file import IndexedFile, token_dtype
from megapipe.errors import ConfigError, DataError
from megapipe.extras.cli.frame import command, option, switch, write_file
from megapipe.extras.cli.quickstart_chat import finetune_and_export, say
from megapipe.extras.cli.report import write_report
from megapipe.extras.preprocess.partial_output import PartialOutput, output_prefix
from megapipe.extras.preprocess.preprocess import Progress, preprocess
from megapipe.extras.preprocess.text_source import TEXT_KEY, corpus_documents, read_records, write_jsonl
from megapipe.extras.preprocess.tokenizer_training import train_tokenizer
from megapipe.extras.report.folder import read_run
from megapipe.formatting import bytes_text, count_text
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.tokenizers.hugging_face import optional_package
from megapipe.tokenizers.tokenizer import build_tokenizer, tokenizer_fingerprint

CPU_FLAGS = ("--config", str(SUPPLIED / "quickstart.yaml"))
GPU_FLAGS = (*CPU_FLAGS, "--config", str(SUPPLIED / "quickstart_gpu.yaml"))
CPU_RANKS = 8
RANK_BYTES = 256 << 20  # of a rank on the CPU, besides what is planned: Python, torch, gloo's buffers
SAVE_INTERVAL, WARMUP_STEPS, PROFILE_STEP = 100, 20, 20
DECAY_SHARE = 0.35  # of the steps of a run, at its end
SPLIT = "90,10,0"
TOKENIZER = "HuggingFaceTokenizer"
TOKENIZER_CHARACTERS = 1_000_000  # of text to train it on; more takes longer and hardly improves it
STDLIB_NAME, STDLIB_PROMPTS = "python-stdlib", ("def __init__(self", "import ", "    for i in ")
PROMPT_WORDS, NUM_PROMPTS, SAMPLE_TOKENS = 4, 3, 40
SET_HERE = {  # what to use -> fields that the quickstart sets itself
    "--corpus": ("data.data_path",),
    "--corpus and --vocab-size": ("data.tokenizer_type", "data.tokenizer_model"),
    "--steps": ("training.train_iters", "training.train_samples"),
    "--out": ("checkpoint.save", "checkpoint.load"),
}
OPTIONS = (
    option("--corpus", "text to train on (default: the source of Python's standard library)", metavar="DIR_OR_FILE"),
    option("--out", "output directory", metavar="DIR", type=Path, default="runs/quickstart"),
    option("--steps", "steps of this run", default=350, above=0),
    option("--ranks", f"ranks to start (default: {CPU_RANKS} on a CPU, else as many GPUs as the grid uses)", type=int),
    option("--vocab-size", "tokens of the tokenizer", default=2048),
    option("--megabytes", "most text to use", default=8.0, above=0),
    switch("--sft", "then finetune on conversations, show one, export the model for transformers"),
)


@dataclass(frozen=True)
class Prepared:
    """Prepared data. prefix: of the token files. entropy: of single validation tokens, in nats."""

    folder: Path
    prefix: Path
    tokenizer: Path
    entropy: float
    prompts: tuple[str, ...]  # texts to continue


@dataclass(frozen=True)
class Grid:
    """A grid for this machine. flags: of pretrain_gpt.py, with the YAML files. reason: the text to print."""

    num_ranks: int
    num_gpus: int
    flags: tuple[str, ...]
    reason: str


@command(
    "megapipe quickstart",
    OPTIONS,
    takes_config=True,
    needs_words=False,
    interrupted="\ninterrupted during preparation; the same command continues from the complete files",
)
def main(own: argparse.Namespace) -> int:
    """Make a corpus, a tokenizer and token files, and pretrain a small GPT on a grid that fits this machine.

    --sft goes on: it finetunes the model on conversations, shows an exchange, and exports it for transformers.

    Existing files are reused; a second run continues from the checkpoint of the first for as many steps again. At the
    end it prints a summary and writes a report. launch/quickstart.sh installs megapipe and runs it.
    """
    began = time.monotonic()
    optional_package("tokenizers", "megapipe quickstart", "tokenizers")
    grid = choose_grid(own.flags, own.ranks)
    check_run(config := _config([*grid.flags, *own.flags]), own.vocab_size, grid.num_ranks)
    check_folder(own.out)
    prepared = prepare(own.corpus, own.out, own.vocab_size, own.megabytes)
    checkpoints = prepared.folder / "checkpoints"
    done = steps_done(checkpoints)
    launched = ["--nproc-per-node", str(grid.num_ranks), "pretrain", *grid.flags]
    is_profiled = not grid.num_gpus  # profiles over NCCL are untested
    words = [*launched, *pretrain_arguments(prepared, checkpoints, done, own.steps, is_profiled), *own.flags]
    say("training", f"{grid.reason}; {f'continuing after step {done}, ' if done else ''}{own.steps} steps")
    print(f"   megapipe launch {shlex.join(words)}\n", flush=True)
    from megapipe.extras.cli.launch import launch

    code = launch(words)
    reached = steps_done(checkpoints)
    if code == 0 and reached >= done + own.steps:
        seconds = time.monotonic() - began
        say("done", f"{reached} steps, checkpoint in {checkpoints}, {seconds:.0f} s in all without the installation")
        losses = {record["step"]: record["loss"] for record in read_run(checkpoints).evaluations("validation")}
        loss, entropy = losses.get(reached), prepared.entropy
        if loss is not None:
            print(
                f"   validation loss          {loss:.3f} nats a token\n   unigram entropy          {entropy:.3f} nats: "
                "the loss of a model that only knows the frequency of each token\n   learned beyond that      "
                f"{entropy - loss:.3f} nats a token\n   the same command continues from here for as many steps again",
                flush=True,
            )
        report = write_report(checkpoints)
        say("report", f"{report}: curves, plan and measured timeline, configuration; open it in any browser")
        if own.sft:
            launched += [*tokenizer_arguments(prepared), *own.flags]
            return finetune_and_export(prepared.folder, checkpoints, reached, launched, config.training.device)
    elif code == 0:
        say("stopped", f"after step {reached}, which is saved in {checkpoints}; the same command continues from there")
    return code


def choose_grid(flags: Sequence[str], asked_ranks: int | None) -> Grid:
    """Choose tp 2 x pp 2 x 2 chunks x dp with at least 4 GPUs or on a CPU, a smaller grid with fewer GPUs; `flags` win.

    Raises ConfigError if there are fewer GPUs than ranks.
    """
    device = _config([*CPU_FLAGS, *flags]).training.device
    num_gpus = 0 if device == "cpu" else count_gpus()
    slots = min(num_gpus, asked_ranks or num_gpus) if num_gpus else CPU_RANKS
    grid_flags: tuple[str, ...] = CPU_FLAGS
    if num_gpus == 0 and device == "auto":  # a torch that is built for GPUs takes the CPU only if it is told to
        grid_flags = (*CPU_FLAGS, "--device", "cpu")
    if num_gpus:  # the largest grid of this kind that the GPUs hold
        tp, pp = 2 if slots >= 4 else 1, 2 if slots >= 2 else 1
        sizes = ("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp))
        grid_flags = (*GPU_FLAGS, *sizes, "--num-virtual-stages-per-pipeline-rank", "2" if pp > 1 else "none")
    config = _config([*grid_flags, *flags])
    parallel, training = config.parallel, config.training
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_size == 1 and parallel.num_virtual_stages_per_pipeline_rank is not None:
        # one rank has no pipeline to interleave
        grid_flags = (*grid_flags, "--num-virtual-stages-per-pipeline-rank", "none")
    needed = max(replica, asked_ranks or 0)
    if 0 < num_gpus < needed:
        raise ConfigError(
            f"{needed} ranks need {needed} GPUs, but there are {num_gpus}; add --device cpu, or make the grid smaller"
        )
    copies, batch = max(1, slots // replica), training.global_batch_size
    while copies > 1 and batch is not None and batch % (training.micro_batch_size * copies):
        copies -= 1  # a batch is cut evenly: of 12 GPUs 8 are used
    num_ranks = asked_ranks if asked_ranks is not None else copies * replica
    found = f"{count_text(num_gpus, 'GPU')}, so NCCL" if num_gpus else "no GPU is used, so gloo on the CPU"
    return Grid(num_ranks, num_gpus, grid_flags, f"{found}: {count_text(num_ranks, 'rank')}")


def check_run(config: Config, vocab_size: int, num_ranks: int) -> None:
    """Raise ConfigError for a device, a grid or a model that cannot train here, before a corpus is made for it."""
    from megapipe.comm.bootstrap import choose_backend  # these import torch
    from megapipe.extras.doctor.host import resources

    _, device = choose_backend(config.parallel.distributed_backend, config.training.device, 0)
    if config.model.vocab_size is None:
        config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    plan = resolve(config, num_ranks)
    available = resources().available_bytes
    needed = num_ranks * (RANK_BYTES + sum(rank.total for rank in all_rank_memory(plan)) // plan.topology.pp)
    if device.type == "cpu" and available is not None and needed > available:
        raise ConfigError(
            f"{count_text(num_ranks, 'rank')} need {bytes_text(needed)} of memory on the CPU, but "
            f"{bytes_text(available)} are free; end other programs, make the model smaller, or use fewer ranks: "
            "--ranks 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
        )


def check_folder(folder: Path) -> None:
    """Make the folder of --out. Raises ConfigError if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}; give another folder") from None


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _config(flags: Sequence[str]) -> Config:
    """Load the configuration so far. Raises ConfigError for unknown flags and for those that the quickstart sets."""
    loaded = load_config(flags, is_job=False)
    for instead, key in ((instead, key) for instead, keys in SET_HERE.items() for key in keys):
        if loaded.origins[key].startswith("flag"):
            raise ConfigError(f"{fields_by_key()[key].main_flag} is set by the quickstart itself; use {instead}")
    return loaded.config


def prepare(corpus: str | None, out: Path, vocab_size: int, megabytes: float) -> Prepared:
    """Make the missing files, and print each step. Raises ConfigError, DataError."""
    documents = corpus_documents(corpus, megabytes)
    texts = hashlib.sha256()
    for text in documents:
        texts.update(len(text).to_bytes(8, "little") + text.encode("utf-8"))
    digest = hashlib.sha256(f"{TOKENIZER} {vocab_size} {SPLIT} {texts.hexdigest()}".encode())
    name = STDLIB_NAME if corpus is None else re.sub(r"[^\w.-]", "_", Path(corpus).resolve().name)[:40]
    folder = out / f"{name}-{digest.hexdigest()[:8]}"
    record, prefix = folder / "prepared.json", Path(output_prefix(str(folder / "tokens"), "text"))
    tokenizer = folder / "tokenizer"
    source = "the source of Python's standard library" if corpus is None else corpus
    if record.is_file():
        facts = json.loads(record.read_text(encoding="utf-8"))
        say("data", f"{folder} is reused: {facts['tokens']:,} tokens of {source}")
        return Prepared(folder, prefix, tokenizer, facts["entropy"], tuple(facts["prompts"]))
    began = time.monotonic()
    size = sum(len(text.encode("utf-8")) for text in documents) / 1e6
    say("corpus", f"{len(documents):,} documents, {size:.1f} MB of {source}, SHA-256 {texts.hexdigest()}")
    write_jsonl(documents, folder / "corpus.jsonl")
    ends = itertools.accumulate(map(len, documents))
    sample = [text for text, end in zip(documents, ends, strict=True) if end <= TOKENIZER_CHARACTERS]
    train_tokenizer(sample or documents, tokenizer, vocab_size)
    say("tokenizer", f"{vocab_size:,} tokens (byte-level BPE), {time.monotonic() - began:.1f} s")
    encoder = build_tokenizer(TOKENIZER, str(tokenizer))
    made = tokenizer_fingerprint(encoder, str(tokenizer))
    target, dtype = str(folder / "tokens"), token_dtype(vocab_size)
    counts = preprocess(
        read_records([folder / "corpus.jsonl"]),
        PartialOutput(target, [TEXT_KEY], dtype, overwrite=True, tokenizer=made),
        encoder,
        append_eod=True,
        num_workers=min(4, os.cpu_count() or 1),
        progress=Progress(),
    )
    tokens = sum(counts.tokens.values())
    file, validation = IndexedFile(prefix), parse_split(SPLIT)[1]
    assert validation is not None
    entropy = unigram_entropy(np.concatenate([file.read(i) for i in range(*sequence_range(validation, len(file)))]))
    first, last = sequence_range(validation, len(documents))
    # the first words of the first documents with any
    lines = (next((line for line in text.splitlines() if re.match(r"\w", line)), "") for text in documents[first:last])
    found = tuple(" ".join(line.split()[:PROMPT_WORDS]) for line in lines if line)[:NUM_PROMPTS]
    prompts = STDLIB_PROMPTS if corpus is None else found or ("The ",)
    say("tokens", f"{tokens:,} in {prefix}.bin/.idx, unigram entropy of the validation part {entropy:.3f} nats")
    facts = {"source": source, "documents": len(documents), "tokens": tokens, "entropy": entropy, "prompts": prompts}
    write_file(record, json.dumps(facts), "--out")  # last: the folder is complete
    return Prepared(folder, prefix, tokenizer, entropy, prompts)


def steps_done(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 without one."""
    found = find_checkpoint(checkpoints) if checkpoints.is_dir() else None
    return 0 if found is None else found.step


def tokenizer_arguments(prepared: Prepared) -> list[str]:
    return ["--tokenizer-type", TOKENIZER, "--tokenizer-model", str(prepared.tokenizer)]


def pretrain_arguments(
    prepared: Prepared, checkpoints: Path, done: int, steps: int, is_profiled: bool = False
) -> list[str]:
    """Return the flags of pretrain_gpt.py for data, length, schedule, checkpoints and prompts.

    is_profiled: also two steps of the pipeline for the report, soon after the first steps.
    """
    total = done + steps
    settings = {
        "--data-path": str(prepared.prefix),
        "--split": SPLIT,
        "--train-iters": str(total),
        "--lr-warmup-iters": str(min(WARMUP_STEPS, total // 4)),
        "--lr-wsd-decay-iters": str(max(1, round(steps * DECAY_SHARE))),
        "--save": str(checkpoints),
        "--load": str(checkpoints),
        "--save-interval": str(SAVE_INTERVAL),
        "--keep-last": "2",
    }
    words = [*tokenizer_arguments(prepared), *(word for setting in settings.items() for word in setting)]
    words += [
        "--override-opt_param-scheduler",
        "--sample-tokens",
        str(SAMPLE_TOKENS),
        "--sample-prompts",
        *prepared.prompts,
    ]
    if is_profiled:
        start = done + max(0, min(PROFILE_STEP, steps - 2))
        end = min(start + 2, total)
        words += ["--profile-pipeline", "--profile-step-start", str(start), "--profile-step-end", str(end)]
    return words


def unigram_entropy(tokens: NDArray[np.integer]) -> float:
    """Return the entropy of token frequencies in nats: the loss of a model that knows only these. Raises DataError."""
    counts = np.bincount(tokens.reshape(-1).astype(np.int64))
    counts = counts[counts > 0]
    if not len(counts):
        raise DataError("the entropy of an empty array of tokens is undefined")
    frequencies = counts / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())

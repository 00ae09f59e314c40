"""`megapipe quickstart`: train a small GPT on text of this machine; launch/quickstart.sh installs megapipe and runs it.

Corpus -> tokenizer -> token files -> training on a grid that fits the machine -> summary and report. Existing files are
reused; a second run continues from the checkpoint of the first for as many steps again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.config.config import Config, fields_by_key
from megapipe.config.load import load_config
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli.quickstart_corpus import SPLIT, TOKENIZER, Prepared, prepare
from megapipe.extras.cli.report import write_report

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "pretrain_gpt.py"
CPU_CONFIG, GPU_CONFIG = REPOSITORY / "configs" / "quickstart.yaml", REPOSITORY / "configs" / "quickstart_gpu.yaml"
CPU_RANKS = 8
DEFAULT_STEPS, DEFAULT_VOCAB_SIZE, DEFAULT_MEGABYTES = 350, 2048, 8.0
SAVE_INTERVAL, WARMUP_STEPS, PROFILE_STEP = 100, 20, 20
DECAY_SHARE = 0.35  # of the steps of a run, at its end
OWN_BUSINESS = {  # fields that the quickstart sets itself -> what to use instead
    "data.data_path": "--corpus",
    "data.tokenizer_type": "--corpus and --vocab-size",
    "data.tokenizer_model": "--corpus and --vocab-size",
    "training.train_iters": "--steps",
    "training.train_samples": "--steps",
    "checkpoint.save": "--out",
    "checkpoint.load": "--out",
}


def main(arguments: Sequence[str]) -> int:
    """Run the quickstart and return the exit code."""
    try:
        return quickstart(list(arguments))
    except MegapipeError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "\nquickstart: interrupted during preparation; the same command continues from the complete files",
            file=sys.stderr,
        )
        return 130


def quickstart(arguments: list[str]) -> int:
    """Prepare, train, summarize and write the report; return the exit code. Raises MegapipeError."""
    began = time.monotonic()
    wishes, flags = parse(arguments)
    grid = choose_grid(flags, wishes.ranks)
    prepared = prepare(wishes.corpus, Path(wishes.out), wishes.vocab_size, wishes.megabytes)
    checkpoints = prepared.folder / "checkpoints"
    done = steps_done(checkpoints)
    job = pretrain_arguments(prepared, checkpoints, grid.configs, done, wishes.steps)
    # profiles over NCCL are untested
    profile = () if GPU_CONFIG in grid.configs else profile_flags(done, wishes.steps)
    words = ["--nproc-per-node", str(grid.num_ranks), str(SCRIPT), *job, *grid.flags, *profile, *flags]
    _say("training", f"{grid.reason}; {f'continuing after step {done}, ' if done else ''}{wishes.steps} steps")
    print(f"   megapipe launch {shlex.join(words)}\n", flush=True)
    from megapipe.extras.cli.launch import launch  # torch

    code = launch(words)
    reached = steps_done(checkpoints)
    if code == 0 and reached >= done + wishes.steps:
        summarize(prepared, checkpoints, reached, time.monotonic() - began)
        _say(
            "report",
            f"{write_report(checkpoints)}: curves, plan and measured timeline, configuration; open it in any browser",
        )
    elif code == 0:
        _say("stopped", f"after step {reached}, which is saved in {checkpoints}; the same command continues from there")
    return code


@dataclass(frozen=True)
class Grid:
    """A grid for this machine. configs: YAML files. flags: added so that it fits. reason: the text to print."""

    num_ranks: int
    configs: tuple[Path, ...]
    flags: tuple[str, ...]
    reason: str


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (own options, flags for pretrain_gpt.py). Raises ConfigError."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")

    parser = argparse.ArgumentParser(
        prog="quickstart",
        usage="launch/quickstart.sh [options] [--] [any flag of pretrain_gpt.py]",
        description=(
            "Make a corpus, a tokenizer and token files, and pretrain a small GPT on this machine. Run it again to "
            "continue."
        ),
        allow_abbrev=False,
    )
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument(
        "--corpus", metavar="DIR_OR_FILE", help="text to train on (default: the source of Python's standard library)"
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/quickstart", help="output directory (default: runs/quickstart)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=DEFAULT_STEPS, help=f"steps of this run (default: {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help=f"ranks to start (default: {CPU_RANKS} on a CPU, else as many GPUs as the grid can use)",
    )
    parser.add_argument(
        "--vocab-size",
        metavar="N",
        type=int,
        default=DEFAULT_VOCAB_SIZE,
        help=f"pieces of the tokenizer (default: {DEFAULT_VOCAB_SIZE})",
    )
    parser.add_argument(
        "--megabytes",
        metavar="X",
        type=float,
        default=DEFAULT_MEGABYTES,
        help=f"most text to use (default: {DEFAULT_MEGABYTES:g})",
    )
    wishes, flags = parser.parse_known_args(
        [word.replace("_", "-", 1) if word.startswith("--vocab_size") else word for word in arguments]
    )
    for name in ("steps", "megabytes"):
        if getattr(wishes, name) <= 0:
            raise ConfigError(f"--{name} {getattr(wishes, name)}: expected a number above 0")
    return wishes, [word for word in flags if word != "--"]


def choose_grid(flags: Sequence[str], asked_ranks: int | None) -> Grid:
    """Choose tp 2 x pp 2 x 2 chunks x dp with at least 4 GPUs or on a CPU, a smaller grid with fewer GPUs; `flags` win.

    Raises ConfigError if there are fewer GPUs than ranks.
    """
    config = _config((CPU_CONFIG,), flags)
    num_gpus = 0 if config.training.device == "cpu" else count_gpus()
    slots = min(num_gpus, asked_ranks or num_gpus) if num_gpus else CPU_RANKS
    configs = (CPU_CONFIG, GPU_CONFIG) if num_gpus else (CPU_CONFIG,)
    grid_flags = gpu_grid(slots) if num_gpus else ()
    parallel = _config(configs, [*grid_flags, *flags]).parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_size == 1 and parallel.num_virtual_stages_per_pipeline_rank is not None:
        grid_flags = (
            *grid_flags,
            "--num-virtual-stages-per-pipeline-rank",
            "none",
        )  # one rank has no pipeline to interleave
    needed = max(replica, asked_ranks or 0)
    if 0 < num_gpus < needed:
        raise ConfigError(
            f"{needed} ranks need {needed} GPUs, but there are {num_gpus}; add --device cpu, or make the grid smaller"
        )
    num_ranks = asked_ranks if asked_ranks is not None else max(1, slots // replica) * replica
    found = f"{num_gpus} GPU{'s' * (num_gpus > 1)}, so NCCL" if num_gpus else "no GPU, so gloo on the CPU"
    return Grid(num_ranks, configs, grid_flags, f"{found}: {num_ranks} rank{'s' * (num_ranks > 1)}")


def gpu_grid(num_gpus: int) -> tuple[str, ...]:
    """Return the flags of the largest such grid for this many GPUs."""
    tp, pp = (2, 2) if num_gpus >= 4 else (1, 2) if num_gpus >= 2 else (1, 1)
    chunks = "2" if pp > 1 else "none"
    sizes = ("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp))
    return (*sizes, "--num-virtual-stages-per-pipeline-rank", chunks)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def steps_done(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 without one."""
    found = find_checkpoint(checkpoints) if checkpoints.is_dir() else None
    return 0 if found is None else found.step


def pretrain_arguments(
    prepared: Prepared, checkpoints: Path, configs: Sequence[Path], done: int, steps: int
) -> list[str]:
    """Return the flags of pretrain_gpt.py for data, length, schedule, checkpoints and prompts."""
    total = done + steps
    settings = {
        "--data-path": str(prepared.prefix),
        "--split": SPLIT,
        "--tokenizer-type": TOKENIZER,
        "--tokenizer-model": str(prepared.tokenizer),
        "--train-iters": str(total),
        "--lr-warmup-iters": str(min(WARMUP_STEPS, total // 4)),
        "--lr-wsd-decay-iters": str(max(1, round(steps * DECAY_SHARE))),
        "--save": str(checkpoints),
        "--load": str(checkpoints),
        "--save-interval": str(SAVE_INTERVAL),
        "--keep-last": "2",
    }
    words = [word for path in configs for word in ("--config", str(path))]
    words += [word for pair in settings.items() for word in pair]
    return [*words, "--override-opt_param-scheduler", "--sample-prompts", *prepared.prompts]


def profile_flags(done: int, steps: int) -> tuple[str, ...]:
    """Return flags that profile two steps of the pipeline for the report, soon after the first steps."""
    start = done + max(0, min(PROFILE_STEP, steps - 2))
    return (
        "--profile-pipeline",
        "--profile-step-start",
        str(start),
        "--profile-step-end",
        str(min(start + 2, done + steps)),
    )


def summarize(prepared: Prepared, checkpoints: Path, step: int, seconds: float) -> None:
    """Print the last lines: the validation loss against the entropy of single tokens."""
    loss = last_validation_loss(checkpoints / "metrics.jsonl", step)
    entropy = prepared.entropy
    _say("done", f"{step} steps, checkpoint in {checkpoints}, {seconds:.0f} s in all without the installation")
    if loss is not None:
        print(
            f"   validation loss          {loss:.3f} nats a token\n   unigram entropy          {entropy:.3f} nats: "
            "the loss of a model that only knows the frequency of each token\n   learned beyond that      "
            f"{entropy - loss:.3f} nats a token\n   the same command continues from here for as many steps again",
            flush=True,
        )


def last_validation_loss(metrics: Path, step: int) -> float | None:
    """Return the validation loss after `step` from metrics.jsonl, None if there was no evaluation."""
    import json

    found = None
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        record = json.loads(line)
        if record["kind"] == "evaluation" and record["split"] == "validation" and record["step"] == step:
            found = record["loss"]
    return found


def _config(configs: Sequence[Path], flags: Sequence[str]) -> Config:
    """Load the configuration so far. Raises ConfigError for unknown flags and for those that the quickstart sets."""
    if not SCRIPT.is_file() or not all(path.is_file() for path in configs):
        raise ConfigError(f"the quickstart needs a clone of the repository; {REPOSITORY} is not one")
    loaded = load_config([word for path in configs for word in ("--config", str(path))] + list(flags), is_job=False)
    for key, instead in OWN_BUSINESS.items():
        if loaded.origins[key].startswith("flag"):
            raise ConfigError(f"{fields_by_key()[key].main_flag} is set by the quickstart itself; use {instead}")
    return loaded.config


def _say(word: str, text: str) -> None:
    print(f"== {word}: {text}", flush=True)

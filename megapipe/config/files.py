"""The data, checkpoint and logging sections: what a run reads and writes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.config.layer_pattern import read_text
from megapipe.config.options import EXPERTS, Flag, Need, count, number_in, option
from megapipe.errors import ConfigError
from megapipe.formatting import shortened
from megapipe.registry import Registry

HUGGING_FACE_TOKENIZER = "HuggingFaceTokenizer"


@dataclass(frozen=True)
class TokenizerKind:
    """A type of tokenizer. files: the fields of the data section that must be given. or_model: it also reads
    --tokenizer-model.

    build: of an extension: (--tokenizer-model) -> Tokenizer. The tokenizers of megapipe are in `tokenizers`.
    """

    files: tuple[str, ...] = ("tokenizer_model",)
    build: Callable[[str | None], Any] | None = None
    or_model: bool = False


TOKENIZER_TYPES = Registry(
    "tokenizer",
    "--tokenizer-type",
    {
        "ByteTokenizer": TokenizerKind(()),
        "NullTokenizer": TokenizerKind(()),
        "SentencePieceTokenizer": TokenizerKind(),
        "GPTSentencePieceTokenizer": TokenizerKind(),
        "Llama2Tokenizer": TokenizerKind(),
        HUGGING_FACE_TOKENIZER: TokenizerKind(),
        "GPT2BPETokenizer": TokenizerKind(("vocab_file", "merge_file"), or_model=True),
    },
)


@dataclass(frozen=True)
class DatasetKind:
    """A data set of an extension. build: `data.registered.DatasetPart` -> TokenDataset."""

    build: Callable[..., Any]
    has_loss_mask: bool  # its samples say which tokens are trained


DATASETS: Registry[DatasetKind] = Registry("data set", "--dataset", {})
# from the configuration to an object with log and close
LOGGERS: Registry[Callable[..., Any]] = Registry("logger", "--logger", {})

TOKENIZER = Need("data.tokenizer_type", "--tokenizer-type, the kind of tokenizer in that file")
DATASET = Need("data.dataset", "--dataset NAME")
CYCLIC = Need(
    "data.dataloader_type", "--dataloader-type cyclic", ("cyclic",), without="all samples are read in one order"
)
SFT = Need("data.sft", "--sft, supervised finetuning")
FORMAT = Need("data.sft", "--sft", without="no conversations are read")
SAVE = Need("checkpoint.save", "--save DIR", without="nothing will be saved")
LOAD = Need("checkpoint.load", "--load DIR")
WANDB = Need("logging.wandb_project", "--wandb-project", without="nothing is sent to Weights & Biases")
STRAGGLERS = Need("logging.log_straggler", "--log-straggler", without="nothing is reported")
PROMPTS = Need("logging.sample_prompts", "--sample-prompts", without="no text is written")
DIVIDED = Need("data.data_path", "--data-path", without="nothing else is divided")
HEARTBEATS = Need("parallel.hang_timeout_seconds", "--hang-timeout-seconds above 0, whose heartbeats it reads")
PROMPT_FORMATS = ("default", "chatml", "llama3", "nemotron-h-aligned", "plain")


@dataclass(frozen=True)
class DataConfig:
    """Data and tokenizer. Data paths are blends: PREFIX ... (one epoch of each), or WEIGHT PREFIX WEIGHT PREFIX ..."""

    data_path: tuple[str, ...] | None = option(
        None,
        "PREFIX of PREFIX.bin and PREFIX.idx, or a blend: WEIGHT PREFIX WEIGHT PREFIX ...",
        more_flags=(  # for a blend that is too long for a command line
            Flag(
                "--data-args-path",
                read=lambda path: read_text(path, f"--data-args-path {path}").split(),
                help="data-path from a file with its words",
            ),
        ),
    )
    split: str | None = option(
        None, "shares of --data-path for training, validation and test", derived="969,30,1", needs=DIVIDED
    )
    train_data_path: tuple[str, ...] | None = option(None, "blend for training instead of a share of --data-path")
    valid_data_path: tuple[str, ...] | None = option(None, "blend for validation instead of a share of --data-path")
    test_data_path: tuple[str, ...] | None = option(None, "blend for test instead of a share of --data-path")
    data_cache_path: str | None = option(None, "directory of index caches", derived="a directory next to the data")
    dataset: str | None = option(None, "train on the data set of this name, of an extension", choices=DATASETS)
    dataset_options: tuple[str, ...] = option((), "NAME=TEXT for each option of --dataset", needs=DATASET)
    dataloader_type: str = option(
        "single",
        "order of samples: single, that of the shuffled index, the same on any grid; cyclic, which repeats the data "
        "without end and depends on the number of dp ranks and --micro-batch-size",
        choices=("single", "cyclic"),
    )
    data_sharding: bool = option(
        True, "each dp rank reads its own part of the data; else samples are dealt out in turn", needs=CYCLIC
    )
    mock_data: bool = option(False, "train on generated tokens instead of files")
    num_workers: int = option(2, "threads that prefetch batches on each rank; 0: none", "threads", at_least=0)
    reset_position_ids: bool = option(False, "restart positions after each end-of-document token")
    reset_attention_mask: bool = option(False, "let a token attend only to its own document")
    eod_mask_loss: bool = option(False, "no loss where the input is an end-of-document token")
    sft: bool = option(
        False,
        "supervised finetuning: data are JSON lines of conversations, and only the assistant's tokens are trained",
    )
    sft_tokenizer_prompt_format: str = option(
        "default", "chat template: the tokenizer's own (default), or a fixed one", choices=PROMPT_FORMATS, needs=FORMAT
    )
    sft_packing: bool = option(
        True,
        "pack several conversations into a sequence, which do not see each other; else one in each sequence",
        needs=SFT,
    )
    sft_overlong: str = option(
        "refuse",
        "conversations longer than the sequence: refuse the data, drop them, or truncate them at the end",
        choices=("refuse", "drop", "truncate"),
        needs=SFT,
    )
    tokenizer_type: str | None = option(None, "kind of tokenizer", choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = option(None, "file or directory of the tokenizer", needs=TOKENIZER)
    vocab_file: str | None = option(None, "vocabulary of GPT2BPETokenizer (vocab.json)", needs=TOKENIZER)
    merge_file: str | None = option(None, "merges of GPT2BPETokenizer (merges.txt)", needs=TOKENIZER)

    @property
    def masks_loss(self) -> bool:
        """True if microbatches have a loss mask: some tokens are in no loss."""
        has_own = self.dataset is not None and DATASETS[self.dataset].has_loss_mask
        return self.eod_mask_loss or self.sft or has_own


def is_hugging_face(load: str | None) -> bool:
    """Return True if --load names a Hugging Face folder: checkpoints of a run have no config.json there."""
    return load is not None and os.path.isfile(os.path.join(load, "config.json"))


def split_shares(text: str) -> tuple[float, float, float]:
    """Return the shares of train, validation and test, with sum 1, of '969,30,1' or '8/1/1'. Raises ConfigError.

    Missing numbers are 0, as in Megatron.
    """
    # some launch scripts pass on the quotes around it
    numbers = [number_in(word) for word in text.strip("'\" ").replace("/", ",").split(",")]
    shares = [number for number in numbers if number is not None and 0 <= number < math.inf]
    total = sum(shares)
    if len(shares) != len(numbers) or len(shares) > 3 or total <= 0:
        rule = "expected up to three numbers of at least 0 (training, validation, test), not all 0, such as 969,30,1"
        raise ConfigError(f"--split {shortened(text)}: {rule}")
    shares += [0.0] * (3 - len(shares))
    return shares[0] / total, shares[1] / total, shares[2] / total


def parse_blend(words: Sequence[str], flag: str) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights (or None) of PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ... Raises ConfigError."""
    words = [word.strip() for word in words]
    if not words or not all(words):
        raise ConfigError(f"{flag} is empty; give a PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    numbers = [number_in(word) for word in words]
    weights = [number for number in numbers if number is not None]
    if not weights:
        return words, None
    if [number is not None for number in numbers] != [True, False] * (len(words) // 2):
        rule = "weights and prefixes must alternate, WEIGHT PREFIX WEIGHT PREFIX ..., or there must be no weights"
        raise ConfigError(f"{flag} {shortened(' '.join(words))}: {rule}")
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"{flag} {shortened(' '.join(words))}: weights must be above 0")
    return words[1::2], weights


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, which are kept, and what is loaded from one."""

    save: str | None = option(None, "directory to save checkpoints in")
    load: str | None = option(None, "directory to load a checkpoint from")
    save_interval: int | None = count(
        None,
        "steps between checkpoints; unset: only at the end",
        "steps",
        needs=SAVE,
        more_flags=(Flag("--persistent-save-interval"),),
    )
    save_interval_minutes: float | None = option(
        None, "time between saves, at the end of a step; also without --save-interval", "minutes", above=0, needs=SAVE
    )
    async_save: bool = option(
        False, "write checkpoints in the background; training waits only while its tensors are copied", needs=SAVE
    )
    exit_on_save_failure: bool = option(
        False,
        "end the run when a background save fails (a save that training waits for, and the last save, always do)",
        needs=SAVE,
    )
    no_save_optim: bool = option(False, "leave the optimizer out of checkpoints", off_flag="--save-optim")
    no_save_rng: bool = option(False, "leave random state out of checkpoints", off_flag="--save-rng")
    no_load_optim: bool = option(False, "start with a fresh optimizer", off_flag="--load-optim")
    no_load_rng: bool = option(False, "start with fresh random state", off_flag="--load-rng")
    finetune: bool = option(False, "load only the weights and start at step 0", needs=LOAD)
    ckpt_step: int | None = option(None, "step to load", "steps", at_least=0, derived="the latest", needs=LOAD)
    exit_on_missing_checkpoint: bool = option(
        False, "fail instead of starting from scratch if --load contains no checkpoint", needs=LOAD
    )
    use_checkpoint_args: bool = option(False, "take the model section from the checkpoint", needs=LOAD)
    allow_changed_model: bool = option(
        False, "load a checkpoint of a model that computes another function than this run's", needs=LOAD
    )
    allow_changed_optimizer: bool = option(
        False, "continue from a checkpoint that was trained by another update rule or other settings of it", needs=LOAD
    )
    allow_changed_data: bool = option(
        False, "continue from a checkpoint that was trained on other data than this run's", needs=LOAD
    )
    keep_last: int | None = count(
        None,
        "newest checkpoints to keep besides those of --save-retain-interval; unset: all, or with it the newest one",
        "checkpoints",
        needs=SAVE,
    )
    save_retain_interval: int | None = count(
        None, "keep the checkpoints of steps divisible by this forever", "steps", needs=SAVE
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Logging to the console, to metrics.jsonl and to each writer that is configured; profiles; samples at the end."""

    log_interval: int | None = count(
        None, "steps between log lines", "steps", derived="100, or a twentieth of the steps of a shorter run"
    )
    quiet: bool = option(
        False, "print no plan and no line for a step or an evaluation; notes on checkpoints and problems still appear"
    )
    tensorboard_dir: str | None = option(None, "directory of TensorBoard files; unset: none")
    wandb_project: str | None = option(None, "Weights & Biases project; unset: none")
    wandb_entity: str | None = option(None, "Weights & Biases entity; unset: that of the login", needs=WANDB)
    wandb_exp_name: str | None = option(
        None, "Weights & Biases run name", needs=WANDB, more_flags=(Flag("--wandb-name"),)
    )
    wandb_save_dir: str | None = option(None, "directory of Weights & Biases files", needs=WANDB)
    logger: tuple[str, ...] = option((), "loggers of an extension that get the metrics too", choices=LOGGERS)
    log_params_norm: bool = option(False, "log the norm of the weights")
    moe_per_layer_logging: bool = option(
        False, "log the load of every expert and the router losses of every layer, not only their means", needs=EXPERTS
    )
    log_num_zeros_in_grad: bool = option(False, "log how many gradient elements are zero")
    log_throughput: bool = option(False, "log TFLOP/s per device")
    timing_log_level: int = option(0, "phase timers: 0 the step, 1 its phases, 2 every action", at_least=0, at_most=2)
    log_straggler: bool = option(
        False, "name the slowest ranks with every log line, and a slow rank, link or group", needs=HEARTBEATS
    )
    straggler_minmax_count: int = count(
        1, "number of slowest and of fastest ranks that --log-straggler shows", "ranks", needs=STRAGGLERS
    )
    profile: bool = option(False, "write a trace of some steps")
    profile_step_start: int = option(10, "first traced step; the first step of the run is 0", "steps", at_least=0)
    profile_step_end: int = count(12, "step at which tracing ends (it is not traced)", "steps")
    profile_ranks: tuple[int, ...] = option((0,), "global ranks that are traced", at_least=0)
    profile_pipeline: bool = option(
        False, "in the same steps record every rank's actions and compare them with the plan: trace, data, bubble"
    )
    metrics_file: str | None = option(
        None, "JSON lines file with one line per step", derived="metrics.jsonl in --save; without --save none"
    )
    sample_prompts: tuple[str, ...] | None = option(None, "prompts that the model continues at the end of the run")
    sample_tokens: int = count(48, "tokens generated for each of --sample-prompts", "tokens", needs=PROMPTS)

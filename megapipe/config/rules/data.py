"""Rules of data, tokenizer, checkpoints and logging; and those that only a job has to obey."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.data import DataConfig, split_shares
from megapipe.errors import ConfigError
from megapipe.formatting import one_of

TOKENIZER_FILES = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
}


def split_paths(data: DataConfig) -> list[str]:
    """The flags of the data paths of single splits that are given."""
    paths = (
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    )
    return [flag for flag, value in paths if value is not None]


def one_source_of_data(config: Config) -> str | None:
    data = config.data
    given = (
        (["--mock-data"] if data.mock_data else [])
        + (["--data-path"] if data.data_path is not None else [])
        + split_paths(data)[:1]
    )
    if len(given) < 2:
        return None
    return f"{' and '.join(given)} are different sources of data; give one of them"


def split_fits_source(config: Config) -> str | None:
    data = config.data
    if data.split is None:
        return None
    if split_paths(data):
        return f"--split divides --data-path, but {split_paths(data)[0]} names each part by itself; leave --split out"
    try:
        split_shares(data.split)
    except ConfigError as error:
        return str(error)
    return None


def blends_alternate(config: Config) -> str | None:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend = getattr(config.data, name)
        flag = "--" + name.replace("_", "-")
        if blend is None:
            continue
        if not blend:
            return f"{flag} is empty; give a PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ..."
        weights = [is_number(word) for word in blend]
        pairs = weights == [True, False] * (len(blend) // 2)
        if any(weights) and not pairs:
            return (
                f"{flag} {' '.join(blend)}: weights and prefixes have to alternate, WEIGHT PREFIX WEIGHT PREFIX ..., or "
                "there are no weights"
            )
        if pairs and not all(0 < float(word) < float("inf") for word in blend[::2]):
            return f"{flag} {' '.join(blend)}: weights have to be above 0"
    return None


def is_number(word: str) -> bool:
    """Whether a word is a number, as a weight is."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def tokenizer_has_its_files(config: Config) -> str | None:
    data = config.data
    if data.tokenizer_type is None:
        given = [
            "--" + name.replace("_", "-")
            for name in ("tokenizer_model", "vocab_file", "merge_file")
            if getattr(data, name) is not None
        ]
        return f"{one_of(given)} needs --tokenizer-type, which says how to read it" if given else None
    if data.tokenizer_type == "GPT2BPETokenizer" and data.tokenizer_model is not None:
        return None  # a folder with both files, as a checkpoint has it
    for name in TOKENIZER_FILES.get(data.tokenizer_type, ()):
        if getattr(data, name) is None:
            return f"--tokenizer-type {data.tokenizer_type} needs --{name.replace('_', '-')}"
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        return "--tokenizer-type NullTokenizer needs --vocab-size"
    return None


def saving_needs_a_directory(config: Config) -> str | None:
    checkpoint = config.checkpoint
    if checkpoint.save is not None:
        return None
    given = [
        flag
        for flag, is_given in (
            ("--save-interval", checkpoint.save_interval is not None),
            ("--save-interval-minutes", checkpoint.save_interval_minutes is not None),
            ("--save-retain-interval", checkpoint.save_retain_interval is not None),
            ("--keep-last", checkpoint.keep_last is not None),
            ("--async-save", checkpoint.async_save),
            ("--exit-on-save-failure", checkpoint.exit_on_save_failure),
        )
        if is_given
    ]
    return f"{one_of(given)} needs --save DIR" if given else None


def retained_checkpoints_are_saved(config: Config) -> str | None:
    checkpoint = config.checkpoint
    every, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if every is None or (interval is not None and every % interval == 0):
        return None
    if interval is None:
        return f"--save-retain-interval {every} needs a --save-interval that divides it, so that there is something to retain"
    return f"--save-retain-interval {every} is no multiple of --save-interval {interval}; use {max(1, round(every / interval)) * interval}"


def loading_needs_a_directory(config: Config) -> str | None:
    checkpoint = config.checkpoint
    if checkpoint.load is not None:
        return None
    given = [
        flag
        for flag, value in (
            ("--finetune", checkpoint.finetune),
            ("--ckpt-step", checkpoint.ckpt_step is not None),
            ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint),
            ("--use-checkpoint-args", checkpoint.use_checkpoint_args),
        )
        if value
    ]
    return f"{one_of(given)} needs --load DIR" if given else None


def finetuning_starts_anew(config: Config) -> str | None:
    if config.checkpoint.finetune and config.optimizer.use_checkpoint_opt_param_scheduler:
        return "--finetune starts at step 0 with this configuration's schedules; leave --use-checkpoint-opt_param-scheduler out"
    return None


def wandb_needs_a_project(config: Config) -> str | None:
    logging = config.logging
    if logging.wandb_project is not None:
        return None
    given = [
        flag
        for flag, value in (("--wandb-exp-name", logging.wandb_exp_name), ("--wandb-save-dir", logging.wandb_save_dir))
        if value is not None
    ]
    return f"{one_of(given)} needs --wandb-project" if given else None


def job_has_a_length(config: Config) -> str | None:
    training = config.training
    if training.skip_train or training.train_iters is not None or training.train_samples is not None:
        return None
    return "how long to train is missing; give --train-iters or --train-samples (or --skip-train to evaluate only)"


def job_has_a_rate(config: Config) -> str | None:
    if config.training.skip_train or config.optimizer.lr is not None:
        return None
    return "--lr is missing: the highest learning rate"


def job_has_data(config: Config) -> str | None:
    data = config.data
    if data.mock_data or data.data_path is not None:
        return None
    if split_paths(data):
        if data.train_data_path is None and not config.training.skip_train:
            return f"{split_paths(data)[0]} is given, but nothing to train on; add --train-data-path"
        return None
    return "data to train on is missing; give --data-path PREFIX, --train-data-path PREFIX or --mock-data"


def job_has_a_vocabulary(config: Config) -> str | None:
    if config.data.tokenizer_type is not None or config.model.vocab_size is not None:
        return None
    return "the vocabulary is unknown; give --tokenizer-type with its files, or --vocab-size"


DATA_RULES = (
    one_source_of_data,
    split_fits_source,
    blends_alternate,
    tokenizer_has_its_files,
    saving_needs_a_directory,
    retained_checkpoints_are_saved,
    loading_needs_a_directory,
    finetuning_starts_anew,
    wandb_needs_a_project,
)
JOB_RULES = (job_has_a_length, job_has_a_rate, job_has_data, job_has_a_vocabulary)

"""Rules of batch, length, schedules, precision, data, checkpoints, logging and supervised finetuning (with what --sft
implies), and those of training jobs only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megapipe.config.config import Config, fields_by_key, given, value_of
from megapipe.config.files import HUGGING_FACE_TOKENIZER, TOKENIZER_TYPES, parse_blend, split_shares
from megapipe.config.problems import use_multiples
from megapipe.config.training import batch_size_steps
from megapipe.errors import ConfigError
from megapipe.formatting import shortened

TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
SPLIT_PATHS = ("data.train_data_path", "data.valid_data_path", "data.test_data_path")


def batch(config: Config) -> Iterator[str]:
    """Check the batch size, and its ramp or its steps."""
    micro, whole = config.training.micro_batch_size, config.training.global_batch_size
    if whole is not None and whole % micro:
        sizes = f"{use_multiples(micro, whole)} as global batch"
        yield f"--micro-batch-size {micro} does not divide --global-batch-size {whole}; {sizes}"
    yield from _batch_size_steps(config)
    if config.training.rampup_batch_size is None:
        return
    start, increment, _ = config.training.rampup_batch_size
    ramp = f"--rampup-batch-size {' '.join(map(str, config.training.rampup_batch_size))}"
    if whole is None:
        yield f"{ramp} needs --global-batch-size, where it ends"
    elif start < 1 or increment < 1:
        yield f"{ramp}: START and INCREMENT must be at least 1"
    elif start > whole:
        yield f"{ramp} starts above --global-batch-size {whole}; use a START of at most {whole}"
    elif (whole - start) % increment:
        yield f"{ramp} reaches --global-batch-size {whole} only with an INCREMENT that divides {whole - start}"
    elif start % micro or increment % micro:
        yield f"{ramp}: START and INCREMENT must be multiples of --micro-batch-size {micro}"


def _batch_size_steps(config: Config) -> Iterator[str]:
    words, whole = config.training.step_batch_size_schedule, config.training.global_batch_size
    if words is None:
        return
    try:
        sizes = [size for _, size in batch_size_steps(words, config.model.seq_length)]
    except ConfigError as error:
        yield str(error)
        return
    flag, micro = f"--step-batch-size-schedule {' '.join(words)}", config.training.micro_batch_size
    if config.training.rampup_batch_size is not None:
        yield f"{flag} and --rampup-batch-size both change the batch size; give one of the two"
    if whole not in (None, sizes[-1]):
        yield f"{flag} ends with {sizes[-1]}, but --global-batch-size is {whole}; leave it out, or give {sizes[-1]}"
    if odd := [size for size in sizes[:-1] if size % micro]:
        yield f"{flag}: {odd[0]} is not a multiple of --micro-batch-size {micro}; {use_multiples(micro, odd[0])}"


def length(config: Config) -> Iterator[str]:
    """Check that the length of the run is given once, and the schedules in its unit."""
    training = config.training
    lengths = ("optimizer.lr_decay", "optimizer.lr_warmup", "optimizer.lr_wsd_decay")
    in_samples = given(config, *(f"{name}_samples" for name in lengths))
    in_steps = given(config, *(f"{name}_iters" for name in lengths))
    if training.train_iters is not None and training.train_samples is not None:
        yield "--train-iters and --train-samples both give the length of the run; give one of the two"
    elif training.train_iters is not None and in_samples:
        yield f"{', '.join(in_samples)} count in samples, but the length is --train-iters; use one unit for all"
    elif training.train_samples is not None and in_steps:
        yield f"{', '.join(in_steps)} count in steps, but the length is --train-samples; use one unit for all"


def rates(config: Config) -> Iterator[str]:
    """Check the learning rates, their warm-up and their schedule."""
    optimizer, training = config.optimizer, config.training
    lr, decoupled, decoupled_min = optimizer.lr, optimizer.decoupled_lr, optimizer.decoupled_min_lr
    warmups = given(config, *(f"optimizer.lr_warmup_{how}" for how in ("fraction", "iters", "samples")))
    if len(warmups) > 1:
        yield f"{' and '.join(warmups)} each give the warm-up; give one of them"
    for unit in ("iters", "samples"):
        warmup, last_phase, decay = (
            getattr(optimizer, f"lr_{part}_{unit}") for part in ("warmup", "wsd_decay", "decay")
        )
        end = getattr(training, f"train_{unit}") if decay is None else decay
        name = f"--train-{unit}" if decay is None else f"--lr-decay-{unit}"
        if end is not None and end <= warmup:
            yield f"--lr-warmup-{unit} {warmup} must end before {name} {end}; use less, or --lr-warmup-fraction"
        if end is not None and last_phase is not None and end < last_phase:
            yield f"--lr-wsd-decay-{unit} {last_phase} is above {name} {end}; use at most {end}"
    if lr is not None and optimizer.min_lr > lr:
        yield f"--min-lr {optimizer.min_lr:g} is above --lr {lr:g}; use at most {lr:g}"
    elif lr is not None and optimizer.lr_warmup_init > lr:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init:g} is above --lr {lr:g}; use at most {lr:g}"
    if decoupled is not None and decoupled_min is not None and decoupled_min > decoupled:
        yield f"--decoupled-min-lr {decoupled_min:g} is above --decoupled-lr {decoupled:g}; use at most {decoupled:g}"
    has_last_phase = optimizer.lr_wsd_decay_iters is not None or optimizer.lr_wsd_decay_samples is not None
    if optimizer.lr_decay_style == "WSD" and not has_last_phase:
        yield "--lr-decay-style WSD also needs its last phase: --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler are opposites; give only one"


def weight_decay(config: Config) -> Iterator[str]:
    """Check the ramp of the weight decay."""
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style == "constant":
        if any(value is not None and value != optimizer.weight_decay for value in (start, end)):
            way = "add --weight-decay-incr-style linear or cosine, or use only --weight-decay"
            yield f"--start-weight-decay and --end-weight-decay belong to a ramp; {way}"
    elif start is None or end is None:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
    elif start > end:
        yield f"--start-weight-decay {start:g} is above --end-weight-decay {end:g}; the ramp must rise"


def loss_scale_and_profile(config: Config) -> Iterator[str]:
    """Check the range of the dynamic loss scale, and the profiled span of steps."""
    precision, logging = config.precision, config.logging
    least, initial = precision.min_loss_scale, precision.initial_loss_scale
    if precision.dtype == "fp16" and precision.loss_scale is None and least > initial:
        yield f"--min-loss-scale {least:g} is above --initial-loss-scale {initial:g}; use at most {initial:g}"
    start, end = logging.profile_step_start, logging.profile_step_end
    if start >= end:
        yield f"--profile-step-end {end} must be above --profile-step-start {start}"


def checkpoints(config: Config) -> Iterator[str]:
    """Check the retained checkpoints, finetuning, and that a spike rollback finds a checkpoint to go back to."""
    checkpoint, back = config.checkpoint, config.training.spike_rollback
    every, interval, kept = checkpoint.save_retain_interval, checkpoint.save_interval, checkpoint.keep_last
    if every is not None and interval is None:
        yield f"--save-retain-interval {every} needs a --save-interval that divides it"
    elif every is not None and interval is not None and every % interval:
        fitting = max(1, round(every / interval)) * interval
        yield f"--save-retain-interval {every} is not a multiple of --save-interval {interval}; use {fitting}"
    if checkpoint.finetune and config.optimizer.use_checkpoint_opt_param_scheduler:
        yield "--finetune starts at step 0 with this run's schedules; leave --use-checkpoint-opt_param-scheduler out"
    if back is None:
        return
    if checkpoint.save is None or (interval is None and checkpoint.save_interval_minutes is None):
        yield f"--spike-rollback {back} needs checkpoints to go back to: give --save DIR and --save-interval"
    elif checkpoint.no_save_optim:
        yield f"--spike-rollback {back} needs checkpoints with an optimizer, which --no-save-optim leaves out"
    elif kept is not None and kept <= back:
        way = f"give --keep-last {back + 1} or more"
        yield f"--spike-rollback {back} needs {back} checkpoints from before the spike, and one may follow it: {way}"


def sources(config: Config) -> Iterator[str]:
    """Check that there is one source of data, the split, and the blends (the first error only)."""
    data = config.data
    parts = given(config, *SPLIT_PATHS)
    found = given(config, "data.mock_data", "data.data_path", "data.dataset") + parts[:1]
    if len(found) > 1:
        yield f"{' and '.join(found)} are different sources of data; give one of them"
    if data.split is not None and parts:
        yield f"--split divides --data-path, but {parts[0]} names each part itself; leave --split out"
    elif data.split is not None:
        try:
            if not split_shares(data.split)[0] and not config.training.skip_train:
                yield f"--split {shortened(data.split)} leaves nothing for training; make the first number larger"
        except ConfigError as error:
            yield str(error)
    try:
        for key in ("data.data_path", *SPLIT_PATHS):
            words = value_of(config, fields_by_key()[key])
            if words is not None:
                parse_blend(words, fields_by_key()[key].main_flag)
    except ConfigError as error:
        yield str(error)


def tokenizer(config: Config) -> Iterator[str]:
    """Yield the files that a tokenizer lacks, and those that it does not read."""
    data = config.data
    needed = () if data.tokenizer_type is None else TOKENIZER_TYPES[data.tokenizer_type].files
    unread = [name for name in TOKENIZER_FILES if getattr(data, name) is not None and name not in needed]
    missing = [name for name in needed if getattr(data, name) is None]
    if data.tokenizer_type == "GPT2BPETokenizer" and data.tokenizer_model is not None:
        missing = []  # a folder with both files, as in a checkpoint
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        missing = ["vocab_size"]
    if missing:
        yield f"--tokenizer-type {data.tokenizer_type} needs --{missing[0].replace('_', '-')}"
    if unread and data.tokenizer_type is not None and not TOKENIZER_TYPES[data.tokenizer_type].or_model:
        yield f"--tokenizer-type {data.tokenizer_type} does not read --{unread[0].replace('_', '-')}; leave it out"


def job(config: Config) -> Iterator[str]:
    """Yield what a training job lacks: a length, a learning rate, data or a vocabulary."""
    training, data = config.training, config.data
    if not training.skip_train and training.train_iters is None and training.train_samples is None:
        yield "the length of the run is missing; give --train-iters or --train-samples (or --skip-train to evaluate)"
    if not training.skip_train and config.optimizer.lr is None:
        yield "--lr, the highest learning rate, is missing"
    if not data.mock_data and data.data_path is None and data.dataset is None:
        paths = given(config, *SPLIT_PATHS)
        if not paths:
            yield "training data is missing; give --data-path PREFIX, --train-data-path PREFIX or --mock-data"
        elif data.train_data_path is None and not training.skip_train:
            yield f"{paths[0]} is given, but no training data; add --train-data-path"
    if data.tokenizer_type is None and config.model.vocab_size is None:
        yield "the vocabulary is unknown; give --tokenizer-type with its files, or --vocab-size"


# the loss is that of all trained tokens of the global batch, and conversations of a sequence do not see each other
IMPLIED = {
    "training.calculate_per_token_loss": "averages the loss over the trained tokens of the global batch",
    "data.reset_position_ids": "begins every conversation at position 0",
    "data.reset_attention_mask": "lets a token see only its own conversation",
    "data.eod_mask_loss": "gives no loss to the token after the end of a conversation",
}


def with_implied(config: Config) -> Config:
    """Return the configuration with what --sft implies, and with the batch in which --step-batch-size-schedule ends.

    Raises ConfigError for a schedule that cannot be read.
    """
    if (words := config.training.step_batch_size_schedule) is not None:
        _, last = batch_size_steps(words, config.model.seq_length)[-1]
        training = dataclasses.replace(config.training, global_batch_size=config.training.global_batch_size or last)
        config = dataclasses.replace(config, training=training)
    if not config.data.sft:
        return config
    changes: dict[str, dict[str, bool]] = {}
    for key in IMPLIED:
        section, name = key.split(".")
        changes.setdefault(section, {})[name] = True
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    return dataclasses.replace(config, **sections)


def conversations(config: Config) -> Iterator[str]:
    """Check the source of conversations and the tokenizer."""
    data = config.data
    if not data.sft:
        return
    if data.mock_data:
        yield "--mock-data generates tokens, but --sft trains on conversations; give --train-data-path FILE.jsonl"
    if data.tokenizer_type != HUGGING_FACE_TOKENIZER:
        given = f"--tokenizer-type {data.tokenizer_type}" if data.tokenizer_type else "no --tokenizer-type"
        way = f"give --tokenizer-type {HUGGING_FACE_TOKENIZER} --tokenizer-model FOLDER"
        yield f"--sft needs a tokenizer.json, for its special tokens and its chat template, but {given} is given; {way}"


RULES = (
    batch,
    length,
    rates,
    weight_decay,
    loss_scale_and_profile,
    checkpoints,
    sources,
    tokenizer,
    conversations,
)

"""Rules of batch, length, schedules of learning rate and weight decay, and precision."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.precision import PrecisionConfig
from megapipe.config.rules.wording import use_multiples


def micro_divides_global(config: Config) -> str | None:
    micro, whole = config.training.micro_batch_size, config.training.global_batch_size
    if whole is None or whole % micro == 0:
        return None
    return f"--micro-batch-size {micro} does not divide --global-batch-size {whole}; {use_multiples(micro, whole)} as global batch"


def rampup_reaches_batch(config: Config) -> str | None:
    training = config.training
    if training.rampup_batch_size is None:
        return None
    start, increment, _ = training.rampup_batch_size
    micro, whole = training.micro_batch_size, training.global_batch_size
    named = f"--rampup-batch-size {' '.join(str(number) for number in training.rampup_batch_size)}"
    if whole is None:
        return f"{named} needs --global-batch-size, where it ends"
    if start < 1 or increment < 1:
        return f"{named}: START and INCREMENT have to be at least 1"
    if start > whole:
        return f"{named} starts above --global-batch-size {whole}; use a START of at most {whole}"
    if (whole - start) % increment != 0:
        return (
            f"{named}: steps of {increment} from {start} do not reach --global-batch-size {whole}; choose an INCREMENT that "
            f"divides {whole - start}"
        )
    if start % micro != 0 or increment % micro != 0:
        return f"{named}: START and INCREMENT have to be multiples of --micro-batch-size {micro}"
    return None


def one_measure_of_length(config: Config) -> str | None:
    training, optimizer = config.training, config.optimizer
    if training.train_iters is not None and training.train_samples is not None:
        return "--train-iters and --train-samples both say how long training lasts; give one of the two"
    samples_based = [
        (training.rampup_batch_size is not None, "--rampup-batch-size"),
        (optimizer.lr_decay_samples is not None, "--lr-decay-samples"),
        (optimizer.lr_warmup_samples > 0, "--lr-warmup-samples"),
        (optimizer.lr_wsd_decay_samples is not None, "--lr-wsd-decay-samples"),
    ]
    steps_based = [
        (optimizer.lr_decay_iters is not None, "--lr-decay-iters"),
        (optimizer.lr_warmup_iters > 0, "--lr-warmup-iters"),
        (optimizer.lr_wsd_decay_iters is not None, "--lr-wsd-decay-iters"),
    ]
    if training.train_iters is not None and any(given for given, _ in samples_based):
        names = ", ".join(name for given, name in samples_based if given)
        return f"{names} count in samples, but the length is --train-iters; give --train-samples instead, or count them in steps"
    if training.train_samples is not None and any(given for given, _ in steps_based):
        names = ", ".join(name for given, name in steps_based if given)
        return f"{names} count in steps, but the length is --train-samples; give --train-iters instead, or count them in samples"
    return None


def one_warmup(config: Config) -> str | None:
    optimizer = config.optimizer
    given = [
        name
        for name, is_given in (
            ("--lr-warmup-fraction", optimizer.lr_warmup_fraction is not None),
            ("--lr-warmup-iters", optimizer.lr_warmup_iters > 0),
            ("--lr-warmup-samples", optimizer.lr_warmup_samples > 0),
        )
        if is_given
    ]
    return f"{' and '.join(given)} each give the warm-up; give one of them" if len(given) > 1 else None


def warmup_within_decay(config: Config) -> str | None:
    training, optimizer = config.training, config.optimizer
    for unit, warmup, decay, length in (
        ("iters", optimizer.lr_warmup_iters, optimizer.lr_decay_iters, training.train_iters),
        ("samples", optimizer.lr_warmup_samples, optimizer.lr_decay_samples, training.train_samples),
    ):
        end = decay if decay is not None else length
        if end is not None and warmup > 0 and warmup >= end:
            name = f"--lr-decay-{unit}" if decay is not None else f"--train-{unit}"
            return f"--lr-warmup-{unit} {warmup} has to end before {name} {end}; use less, or --lr-warmup-fraction"
    return None


def wsd_is_whole(config: Config) -> str | None:
    optimizer = config.optimizer
    given = optimizer.lr_wsd_decay_iters is not None or optimizer.lr_wsd_decay_samples is not None
    if optimizer.lr_decay_style == "WSD":
        return (
            None
            if given
            else "--lr-decay-style WSD also needs the length of its last phase: --lr-wsd-decay-iters or --lr-wsd-decay-samples"
        )
    if given:
        return f"--lr-wsd-decay-iters and --lr-wsd-decay-samples belong to --lr-decay-style WSD, which is {optimizer.lr_decay_style}"
    return None


def rates_ordered(config: Config) -> str | None:
    optimizer = config.optimizer
    if optimizer.lr is None:
        return None
    if optimizer.min_lr > optimizer.lr:
        return f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}; use at most {optimizer.lr:g}"
    if optimizer.lr_warmup_init > optimizer.lr:
        return f"--lr-warmup-init {optimizer.lr_warmup_init:g} is above --lr {optimizer.lr:g}; use at most {optimizer.lr:g}"
    return None


def decoupled_rates_ordered(config: Config) -> str | None:
    optimizer = config.optimizer
    if optimizer.decoupled_lr is None:
        if optimizer.decoupled_min_lr is not None:
            return "--decoupled-min-lr needs --decoupled-lr"
        return None
    if optimizer.decoupled_min_lr is not None and optimizer.decoupled_min_lr > optimizer.decoupled_lr:
        return f"--decoupled-min-lr {optimizer.decoupled_min_lr:g} is above --decoupled-lr {optimizer.decoupled_lr:g}"
    return None


def weight_decay_ramp_is_whole(config: Config) -> str | None:
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style != "constant":
        if start is None or end is None:
            return f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
        return (
            f"--start-weight-decay {start:g} is above --end-weight-decay {end:g}; the ramp only rises"
            if start > end
            else None
        )
    if any(value is not None and value != optimizer.weight_decay for value in (start, end)):
        return (
            "--start-weight-decay and --end-weight-decay belong to a ramp; add --weight-decay-incr-style linear or cosine, "
            "or use --weight-decay alone"
        )
    return None


def one_scheduler_wins(config: Config) -> str | None:
    if config.optimizer.override_opt_param_scheduler and config.optimizer.use_checkpoint_opt_param_scheduler:
        return (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler are opposites; give one of the two"
        )
    return None


def loss_scale_needs_fp16(config: Config) -> str | None:
    precision, default = config.precision, PrecisionConfig()
    if precision.dtype == "fp16":
        if precision.loss_scale is None and precision.min_loss_scale > precision.initial_loss_scale:
            return f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale {precision.initial_loss_scale:g}"
        return None
    names = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    changed = ["--" + name.replace("_", "-") for name in names if getattr(precision, name) != getattr(default, name)]
    return (
        f"{', '.join(changed)}: the loss is scaled only under --fp16, but --dtype is {precision.dtype}; leave it out"
        if changed
        else None
    )


def post_validation_has_a_barrier_to_remove(config: Config) -> str | None:
    parallel = config.parallel
    if not config.optimizer.optimizer_post_validation:
        return None
    if parallel.pipeline_model_parallel_size == 1:
        return (
            "--optimizer-post-validation removes the barrier between the steps of a pipeline, and --pipeline-model-parallel-size is 1; "
            "leave it out"
        )
    if config.training.calculate_per_token_loss:
        return (
            "--optimizer-post-validation updates before other ranks are heard, but --calculate-per-token-loss divides the gradient by the "
            "number of tokens that all last stages have seen; leave one of the two out"
        )
    return None


def offloaded_state_is_updated_once(config: Config) -> str | None:
    if not config.optimizer.optimizer_cpu_offload or not config.optimizer.optimizer_post_validation:
        return None
    return (
        "--optimizer-post-validation updates while the verdict is on its way, and --optimizer-cpu-offload waits for the gradients to reach "
        "the host; leave one of the two out"
    )


def profile_span_ordered(config: Config) -> str | None:
    logging = config.logging
    if logging.profile_step_start < logging.profile_step_end:
        return None
    return f"--profile-step-end {logging.profile_step_end} has to come after --profile-step-start {logging.profile_step_start}"


def stragglers_need_heartbeats(config: Config) -> str | None:
    if not config.logging.log_straggler or config.parallel.hang_timeout_seconds:
        return None
    return "--log-straggler needs the heartbeats that --hang-timeout-seconds 0 leaves out: give a limit, or leave --log-straggler out"


def spikes_find_a_checkpoint(config: Config) -> str | None:
    back, checkpoint = config.training.spike_rollback, config.checkpoint
    if back is None:
        return None
    if checkpoint.save is None or (checkpoint.save_interval is None and checkpoint.save_interval_minutes is None):
        return f"--spike-rollback {back} needs checkpoints to go back to: give --save DIR and --save-interval"
    if checkpoint.no_save_optim:
        return f"--spike-rollback {back} goes back to checkpoints with an optimizer, which --no-save-optim leaves out"
    if checkpoint.keep_last is not None and checkpoint.keep_last <= back:
        return (
            f"--spike-rollback {back} needs {back} checkpoints from before the spike, and one may come after it: "
            f"give --keep-last {back + 1} or more"
        )
    return None


TRAINING_RULES = (
    spikes_find_a_checkpoint,
    micro_divides_global,
    rampup_reaches_batch,
    one_measure_of_length,
    one_warmup,
    warmup_within_decay,
    wsd_is_whole,
    rates_ordered,
    decoupled_rates_ordered,
    weight_decay_ramp_is_whole,
    one_scheduler_wins,
    loss_scale_needs_fp16,
    post_validation_has_a_barrier_to_remove,
    offloaded_state_is_updated_once,
    profile_span_ordered,
    stragglers_need_heartbeats,
)

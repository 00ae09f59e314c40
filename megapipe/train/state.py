"""The position of a run, its learning rates and weight decay, and its extensions: what is saved besides tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, TypeVar

from megapipe.checkpoint.changes import change_text
from megapipe.checkpoint.save import from_rank_0
from megapipe.comm.groups import Group
from megapipe.config.config import Config
from megapipe.config.training import OptimizerConfig
from megapipe.data.dataset import SkippedSamples
from megapipe.errors import CheckpointError, ConfigError
from megapipe.optimizer.schedule import LrSchedule, Rates, WeightDecaySchedule, lr_schedule, weight_decay_schedule
from megapipe.plan.batch import MOST_MICROBATCHES, BatchSchedule, ramp
from megapipe.plan.run_plan import RunPlan
from megapipe.registry import EXTENSIONS

T = TypeVar("T")
COUNTS = ("step", "consumed_samples", "consumed_tokens", "skipped_steps")
ACCOUNT_COUNTS = ("rollbacks", "discarded_samples", "discarded_tokens")
FLAGS = {
    "lr.max_lr": "--lr",
    "lr.min_lr": "--min-lr",
    "lr.init_lr": "--lr-warmup-init",
    "lr.style": "--lr-decay-style",
    "lr.warmup_samples": "--lr-warmup-iters, -samples or -fraction",
    "lr.decay_samples": "--lr-decay-iters or -samples (by default the length of the training)",
    "lr.wsd_style": "--lr-wsd-decay-style",
    "lr.wsd_samples": "--lr-wsd-decay-iters or -samples",
    "decoupled_lr.max_lr": "--decoupled-lr",
    "decoupled_lr.min_lr": "--decoupled-min-lr",
    "weight_decay.start": "--start-weight-decay or --weight-decay",
    "weight_decay.end": "--end-weight-decay or --weight-decay",
    "weight_decay.style": "--weight-decay-incr-style",
    "weight_decay.ramp_samples": "--train-iters or --train-samples",
}
# settings that a style does not use; styles of the learning rate but WSD do not use those of WSD
UNUSED = {"constant": ("decay_samples", "wsd_style", "wsd_samples", "min_lr", "ramp_samples"), "WSD": ()}


@dataclass(frozen=True)
class Account:
    """Samples that were skipped or trained on in vain."""

    skipped: SkippedSamples = field(default_factory=SkippedSamples)  # windows of the data set that are passed over
    rollbacks: int = 0  # how often the run went back to a checkpoint
    discarded_samples: int = 0  # trained on, then taken back with the weights
    discarded_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ACCOUNT_COUNTS}
        return {"skipped_samples": [list(window) for window in self.skipped.windows], **counts}

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> Account:
        """Restore `to_dict`; None, from a checkpoint without an account, gives an empty one."""
        if values is None:
            return cls()
        return cls(SkippedSamples.of(values["skipped_samples"]), *(int(values[name]) for name in ACCOUNT_COUNTS))


@dataclass
class TrainingState:
    """Position of a run."""

    step: int = 0  # optimizer steps whose results are known, skipped ones included
    consumed_samples: int = 0  # in the order of the data set without account.skipped
    consumed_tokens: int = 0
    skipped_steps: int = 0
    account: Account = field(default_factory=Account)
    spikes: dict[str, Any] | None = None  # state of the spike watch, None without it
    compiles_blocks: bool | None = None  # the choice of --compile-blocks auto, None before it
    # step and consumed samples from which on the batch sizes are this run's
    since: tuple[int, int] = field(default=(0, 0), compare=False)

    def advance(self, samples: int, tokens: int) -> None:
        """Count one more step."""
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def become(self, other: TrainingState) -> None:
        """Take over another position, in place."""
        vars(self).update(vars(other))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts; account and spikes are separate entries of a checkpoint."""
        return {name: getattr(self, name) for name in COUNTS}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """Restore `to_dict`."""
        counts: dict[str, Any] = {name: int(values[name]) for name in COUNTS}
        return cls(**counts)


def batches_to_dict(batch: BatchSchedule, state: TrainingState) -> dict[str, Any]:
    """Return the batch sizes of a run, and the position from which on it has had them, for the checkpoint."""
    return {"since": list(state.since), "full": batch.full, "steps": [list(step) for step in batch.steps]}


def check_position(state: TrainingState, saved: dict[str, Any] | None) -> None:
    """Raise ValueError if the consumed samples of a checkpoint are not those of its steps.

    saved: of `batches_to_dict`; None in a checkpoint without it, which is accepted.
    """
    if saved is None:
        return
    step, samples = state.step, state.consumed_samples
    first, consumed = map(int, saved["since"])
    batch = _saved_batches(saved)
    expected = batch.samples_after(step - first, consumed)
    if step < first or samples != expected:
        taken = f"batches of {batch.full}" + (f", from {batch.steps[0][1]} on," if batch.steps else "")
        raise ValueError(
            f"{samples} consumed samples after step {step}, but with {taken} since step {first} ({consumed} samples) "
            f"they are {expected}"
        )


def _saved_batches(saved: dict[str, Any]) -> BatchSchedule:
    """Return the batch sizes of `batches_to_dict`, or of an older version, which had ramps alone. Raises ValueError."""
    full, steps = int(saved["full"]), tuple((int(start), int(size)) for start, size in saved.get("steps", ()))
    start, increment, samples = (int(saved.get(name, 0)) for name in ("start", "increment", "ramp_samples"))
    if increment and abs((full - start) // increment) <= MOST_MICROBATCHES:
        steps = ramp(start, increment, full, samples)
    starts = [start for start, _ in steps] or [0]
    is_possible = starts[0] == 0 and starts == sorted(starts) and (not steps or steps[-1][1] == full)
    if not is_possible or bool(increment) > bool(steps) or min([full, *(size for _, size in steps)]) < 1:
        raise ValueError(f"batch sizes {saved}")  # nothing can be computed from these
    return BatchSchedule(full, 1, steps)


@dataclass(frozen=True)
class Schedules:
    """Rates over the run. lr: for all parameters but embedding and output layer, which use decoupled_lr."""

    lr: LrSchedule
    decoupled_lr: LrSchedule
    weight_decay: WeightDecaySchedule

    @classmethod
    def of(cls, config: Config) -> Schedules:
        """Return the schedules of a resolved configuration. Raises ConfigError."""
        optimizer, training = config.optimizer, config.training
        return cls(
            lr_schedule(optimizer, training),
            lr_schedule(optimizer, training, decoupled=True),
            weight_decay_schedule(optimizer, training),
        )

    def rates(self, consumed_samples: int) -> Rates:
        """Return the rates of the step that starts after consumed_samples."""
        lr, weight_decay = self.lr(consumed_samples), self.weight_decay(consumed_samples)
        return Rates(lr, weight_decay, self.decoupled_lr(consumed_samples))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schedules:
        """Restore what `asdict` returned."""
        kinds = {"lr": LrSchedule, "decoupled_lr": LrSchedule, "weight_decay": WeightDecaySchedule}
        return cls(**{name: kind(**values[name]) for name, kind in kinds.items()})


def samples_to_take(plan: RunPlan, state: TrainingState) -> int:
    """Return the samples that a run has taken after its last step. With another batch size than before, those of the
    steps that are left do not end where the data of the whole run do.
    """
    return plan.batch.samples_after(plan.config.training.train_iters - state.step, state.consumed_samples)


def schedules_to_resume(own: Schedules, saved: Schedules, optimizer: OptimizerConfig, where: str) -> Schedules:
    """Choose by Megatron's rule: one of two flags says whose settings hold; without either they must agree.

    Raises ConfigError if both flags are given, CheckpointError with every setting that differs if neither is.
    """
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        raise ConfigError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: give one"
        )
    lines = schedule_changes(saved, own)
    if not lines or optimizer.use_checkpoint_opt_param_scheduler:
        return saved
    if optimizer.override_opt_param_scheduler:
        return own
    raise CheckpointError(
        f"the schedules differ from those that {where} was trained with:\n  "
        + "\n  ".join(lines)
        + "\nSet them alike, or give --override-opt-param-scheduler to use those given here or "
        "--use-checkpoint-opt-param-scheduler with the checkpoint's"
    )


def schedule_changes(saved: Schedules, own: Schedules) -> list[str]:
    """Return a line with both values for every setting in which two schedules differ."""
    here, there, lines = asdict(own), asdict(saved), []
    for key, flag in FLAGS.items():
        part, name = key.split(".")
        unused = UNUSED.get(here[part]["style"], ("wsd_style", "wsd_samples"))
        before, now = there[part][name], here[part][name]
        if name not in unused and before != now:
            lines.append(change_text(flag, before, now))
    return lines


def rise_text(saved: Schedules, own: Schedules, consumed_samples: int) -> list[str]:
    """Return a line if the decay of a checkpoint had ended and its learning rate rises again here."""
    before, now, decay = saved.lr(consumed_samples), own.lr(consumed_samples), saved.lr
    if decay.style == "constant" or consumed_samples < decay.decay_samples or now <= before:
        return []
    return [f"--lr: had decayed to {before:.3g} in the checkpoint, and is {now:.3g} here; the loss rises at first"]


def on_rank_0(call: Callable[[], T], world: Group) -> T:
    """Return on all ranks what `call` returns on rank 0; its CheckpointError is raised on all of them."""
    outcome: T | CheckpointError | None = None
    if world.rank == 0:
        try:
            outcome = call()
        except CheckpointError as error:
            outcome = error
    found: T = from_rank_0(outcome, world)
    return found


def check_loaded(config: Config) -> None:
    """Raise ConfigError if the configuration, made in Python, names an extension that is not loaded."""
    for name in config.training.extension:
        if name not in EXTENSIONS.loaded:
            raise ConfigError(
                f"training.extension names {name}, which is not loaded: call EXTENSIONS.load({name!r}) first"
            )


def extension_lines() -> Iterator[str]:
    """Yield a line for each loaded extension, for the log."""
    for one in EXTENSIONS.loaded.values():
        yield f"extension {one.name} ({_short(one.sha256)}): {', '.join(one.provides)}"


def extensions_to_save() -> list[dict[str, Any]]:
    """Return the extensions as JSON, for a checkpoint."""
    return [
        {"name": one.name, "sha256": one.sha256, "provides": list(one.provides)} for one in EXTENSIONS.loaded.values()
    ]


def changed_extensions(saved: list[dict[str, Any]], where: str) -> tuple[str, ...]:
    """Return a line for each extension that is not the one with which a checkpoint was saved. where: the checkpoint."""
    lines = []
    for one, now in product(saved, EXTENSIONS.loaded.values()):
        rows = [row for row in one["provides"] if row in now.provides]
        if rows and now.sha256 != one["sha256"]:
            before = f"{one['name']} ({_short(one['sha256'])}) of {where}"
            what = f"{', '.join(rows)} may be something else"
            lines.append(f"extension {now.name} ({_short(now.sha256)}) is not the {before}: {what}")
    return tuple(lines)


def _short(sha256: str) -> str:
    return f"sha256 {sha256[:12]}"

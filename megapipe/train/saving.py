"""`Saving`: the checkpoints that a run writes, synchronously or in the background, and what is in them.

The manifest's `state` holds:
    training    step, consumed samples and tokens, skipped steps
    optimizer   updates made, loss scaler, update rule; null with --no-save-optim
    random      the seed: all streams are keyed by (seed, step, ...), so it is the random state; null with --no-save-rng
    account     skipped windows of the data set, rollbacks, what they cost
    spikes      losses and norms that the spike watch compares with; null without --spike-rollback
    compiles_blocks   the choice of --compile-blocks auto; null if none was made
    schedules   learning rates and weight decay in force
    global_batch_size   sequences of a step, at the end of a ramp-up
    batches     the batch sizes, and step and consumed samples from which on the run has had them
    versions    of megapipe and of the libraries that compute (train.facts)
    extensions  name, checksum and names of what they provide (train.state)
    data        fingerprint of the training data (data.fingerprint); null without training
    tokenizer   its fingerprint (tokenizers.tokenizer); null without one
    grid, precision   for people and `megapipe inspect checkpoint`
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import (
    Retention,
    abandoned_by,
    move_abandoned,
    prepare_root,
    read_rollbacks,
    step_of_folder,
)
from megapipe.checkpoint.save import Attempt, BackgroundSave, Extras, SaveReport, Staging, save_checkpoint
from megapipe.checkpoint.shard import BLOCK_BYTES, TensorBox, tensor_box
from megapipe.comm.groups import Group
from megapipe.data.fingerprint import Fingerprint
from megapipe.errors import CheckpointError, SaveRefusedError
from megapipe.formatting import bytes_text
from megapipe.monitor.heartbeat import PATIENCE
from megapipe.tokenizers.tokenizer import Fingerprint as TokenizerFingerprint
from megapipe.tokenizers.tokenizer import Tokenizer, files_of
from megapipe.train.facts import versions
from megapipe.train.state import Schedules, TrainingState, batches_to_dict, extensions_to_save, on_rank_0


class Saving:
    """The checkpoints of a run. At most one save is in flight; the next waits for it.

    All ranks call `save`, `write`, `advance` and `finish` together. root: --save; None saves nothing. config_text: the
    configuration as YAML. tokenizer: saved with every checkpoint. say: prints a line once for all ranks. data:
    of the training data, on rank 0. disk: through which rank 0 changes the directory. on_save: called on all ranks with
    the folder of every checkpoint that is complete. made_with: the fingerprint of the tokenizer.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        schedules: Schedules | None,
        root: Path | None,
        config_text: str,
        tokenizer: Tokenizer | None,
        say: Callable[[str], None],
        data: Fingerprint | None = None,
        disk: Disk | None = None,
        on_save: Callable[[Path], None] = lambda folder: None,
        made_with: TokenizerFingerprint | None = None,
    ) -> None:
        self._made_with = made_with
        self._runtime, self._schedules, self._root = runtime, schedules, root
        self._config_text, self._say, self._data, self._on_save = config_text, say, data, on_save
        self._tokenizer_files: dict[str, bytes] = {}
        if root is not None and tokenizer is not None and runtime.groups.world.rank == 0:
            self._tokenizer_files = files_of(tokenizer)
        self.disk = disk or Disk()
        self._flags = runtime.plan.config.checkpoint
        self._staging = Staging()
        if root is not None and self._flags.async_save:
            self._staging.reserve(list(boxes_to_save(runtime)))
        self._in_flight: BackgroundSave | None = None
        self._failure: CheckpointError | None = None  # of the newest save, where training went on
        self.saved_step: int | None = None  # the step that the newest checkpoint holds, or that needs none
        self.saved_at = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """True if a save is in flight whose next `advance` need not wait for this rank."""
        return self._in_flight is not None and self._in_flight.is_ready

    def is_needed(self, step: int) -> bool:
        """Return True if this step can be saved and is not saved yet."""
        return self._root is not None and self.saved_step != step and not self._runtime.plan.config.training.skip_train

    def save(self, state: TrainingState) -> None:
        """Save after a step; with --async-save, return when the tensors have been copied.

        Raises CheckpointError on all ranks if that fails, with --async-save only under --exit-on-save-failure.
        """
        assert self._root is not None
        with self._runtime.heartbeat.phase("saving", PATIENCE):
            if not self._flags.async_save:
                self._report(self.write(state))
            else:
                if self._in_flight is not None:
                    began, step = time.monotonic(), self._in_flight.step
                    self.finish(is_last=False)
                    seconds = time.monotonic() - began
                    self._say(f"waited {seconds:.1f} s for the save of step {step} to end before the next begins")
                self._failure = None
                boxes, extras, keep = self._content(state)
                attempt = Attempt(self.disk, self._root, state.step, extras, keep, BLOCK_BYTES)
                try:
                    self._in_flight = BackgroundSave(attempt, boxes, self._runtime.groups.world, self._staging)
                except CheckpointError as error:
                    self._failed(state.step, error)
        self.saved_step, self.saved_at = state.step, time.monotonic()

    def write(self, state: TrainingState) -> SaveReport:
        """Save after a step, in the foreground. Raises CheckpointError on all ranks."""
        assert self._root is not None
        boxes, extras, keep = self._content(state)
        return save_checkpoint(self._root, state.step, boxes, extras, self._runtime.groups.world, keep, self.disk)

    def advance(self) -> None:
        """Continue the save in flight; called when it `is_ready` on all ranks. Raises as `save` does."""
        in_flight = self._in_flight
        assert in_flight is not None
        with self._runtime.heartbeat.phase("saving", PATIENCE):
            try:
                report = in_flight.advance()
            except CheckpointError as error:
                self._in_flight = None
                self._failed(in_flight.step, error)
                return
        if report is not None:
            self._in_flight = None
            self._report(report)

    def finish(self, is_last: bool) -> None:
        """Wait for the save in flight, if there is one. is_last: no save follows, so its failure is an error."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            if is_last and self._failure is not None:
                raise self._failure
            return
        with self._runtime.heartbeat.phase("saving", PATIENCE):
            try:
                self._report(in_flight.finish())
            except CheckpointError as error:
                if is_last:
                    raise
                self._failed(in_flight.step, error)

    def _content(self, state: TrainingState) -> tuple[Iterator[TensorBox], Extras, Retention]:
        """Return the boxes that this rank writes, the rest of the checkpoint and those to keep. A collective."""
        runtime, plan, flags = self._runtime, self._runtime.plan, self._flags
        config, grid = plan.config, plan.topology
        runtime.stores.finish_weights()
        optimizer: dict[str, Any] | None = None
        if not flags.no_save_optim:
            optimizer = runtime.optimizer.plain_state() | {"rule": config.optimizer.optimizer}
        manifest_state = {
            "training": state.to_dict(),
            "account": state.account.to_dict(),
            "spikes": state.spikes,
            "compiles_blocks": state.compiles_blocks,
            "optimizer": optimizer,
            "random": None if flags.no_save_rng else {"seed": config.training.seed},
            "schedules": None if self._schedules is None else asdict(self._schedules),
            "global_batch_size": plan.batch.full,
            "batches": batches_to_dict(plan.batch, state),
            "data": self._data,
            "tokenizer": self._made_with,
            "extensions": extensions_to_save(),
            "versions": versions(config),
            "precision": config.precision.dtype,
            "grid": {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "chunks": plan.num_chunks},
        }
        extras = Extras(json.loads(json.dumps(manifest_state)), self._config_text, self._tokenizer_files)
        return boxes_to_save(runtime), extras, Retention(flags.keep_last, flags.save_retain_interval)

    def _failed(self, step: int, error: CheckpointError) -> None:
        if self._flags.exit_on_save_failure or isinstance(error, SaveRefusedError):
            raise error
        self._failure = error
        self._say(f"the save of step {step} FAILED: {error}; training continues and saves again when it is due")

    def _report(self, report: SaveReport) -> None:
        waited, names = report.waited_seconds, ", ".join(path.name for path in report.removed)
        background = "" if waited is None else f" in the background; training waited {waited:.2f} s"
        written = f"{bytes_text(report.num_bytes)} in {report.seconds:.1f} s{background}"
        removed = f"; removed {names}" if names else ""
        self._say(report.remark or f"saved {report.path} ({written}){removed}")
        self._on_save(report.path)


def prepare_save(
    root: Path, state: TrainingState, world: Group, damaged: Sequence[Path] = (), disk: Disk | None = None
) -> tuple[str, ...]:
    """Prepare root for a run that starts from `state`, and return remarks on what was done.

    Cleans up after interrupted saves and sets aside damaged checkpoints in it and what rollbacks have abandoned. Raises
    CheckpointError on all ranks if root cannot be written to or holds complete checkpoints of later steps.
    """

    def prepare() -> tuple[str, ...]:
        rollback = abandoned_by(read_rollbacks(root), state.step, state.account.rollbacks)
        if rollback is not None:
            raise CheckpointError(
                f"this run would continue from step {state.step} of an abandoned branch: --save {root} went back from "
                f"step {rollback.from_step} to {rollback.to_step}. To continue it nevertheless give another --save"
            )
        here = [path for path in damaged if path.parent.resolve() == root.resolve()]
        steps = [step_of_folder(path) for path in here]
        return (*move_abandoned(root, disk), *prepare_root(root, state.step, steps, disk))

    return on_rank_0(prepare, world)


def boxes_to_save(runtime: TrainingRuntime) -> Iterator[TensorBox]:
    """Yield the boxes that this rank writes: masters and moments; without the optimizer masters alone, or weights if
    they are other memory. Frozen weights are their own masters."""
    with_optimizer = not runtime.plan.config.checkpoint.no_save_optim
    # the same on all ranks, those without parameters included
    masters_are_parameters = runtime.parameter_dtype == runtime.main_dtype
    if with_optimizer or masters_are_parameters:
        held = (h for h in runtime.optimizer.state() if h.primary and (with_optimizer or h.key == "master"))
        boxes = (tensor_box(h.key, h.piece, h.values) for h in held)
        yield from (box for box in boxes if box is not None)
        yield from (box for is_primary, box in runtime.held_weights("master", only_frozen=True) if is_primary)
    else:
        yield from (box for is_primary, box in runtime.held_weights() if is_primary)

"""`Saves`: the checkpoints that a run writes, while the training waits or beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.checkpoint.attempt import Attempt, Extras, SaveReport
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.save import BackgroundSave, Staging
from megapipe.checkpoint.shard import BLOCK_BYTES
from megapipe.errors import CheckpointError
from megapipe.train.metrics import human_bytes
from megapipe.train.persistence import boxes_to_save, retention, save, what_to_save
from megapipe.train.schedules import Schedules
from megapipe.train.state import TrainingState


class Saves:
    """At most one is under way; the next waits for it. Every method is called by all ranks together, `is_ready` aside.

    tokenizer: contents of its files by name, of which rank 0's are saved. say: prints a line once for all ranks. disk: observed by tests.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        schedules: Schedules | None,
        root: Path,
        config_text: str,
        tokenizer: Mapping[str, bytes],
        say: Callable[[str], None],
        disk: Disk | None = None,
    ) -> None:
        self._runtime, self._schedules, self._root = runtime, schedules, root
        self._config_text, self._tokenizer, self._say = config_text, tokenizer, say
        self._disk = disk or Disk()
        self._flags = runtime.plan.config.checkpoint
        self._staging = Staging()
        if self._flags.async_save:
            self._staging.reserve(list(boxes_to_save(runtime)))
        self._under_way: BackgroundSave | None = None
        self._failure: CheckpointError | None = None  # of the newest save, where training went on

    @property
    def is_ready(self) -> bool:
        """A save is under way whose next `advance` need not wait for this rank."""
        return self._under_way is not None and self._under_way.is_ready

    def save(self, state: TrainingState) -> None:
        """Save after a step; with --async-save return when the tensors are copied.

        Raises CheckpointError on all ranks if that fails, with --async-save only under --exit-on-save-failure.
        """
        if not self._flags.async_save:
            self._say(
                _told(
                    save(
                        self._runtime,
                        state,
                        self._schedules,
                        self._root,
                        self._config_text,
                        self._tokenizer,
                        self._disk,
                    )
                )
            )
            return
        if self._under_way is not None:
            began, step = time.monotonic(), self._under_way.step
            self.finish(is_last=False)
            self._say(
                f"waited {time.monotonic() - began:.1f} s for the save of step {step} to end before the next begins"
            )
        self._failure = None
        boxes, content = what_to_save(self._runtime, state, self._schedules)
        extras = Extras(content, self._config_text, self._tokenizer)
        attempt = Attempt(self._disk, self._root, state.step, extras, retention(self._runtime.plan.config), BLOCK_BYTES)
        try:
            self._under_way = BackgroundSave(attempt, boxes, self._runtime.groups.world, self._staging)
        except CheckpointError as error:
            self._failed(state.step, error)

    def advance(self) -> None:
        """Go on with the save under way; called when it `is_ready` on all ranks. Raises as `save` does."""
        assert self._under_way is not None
        step = self._under_way.step
        try:
            report = self._under_way.advance()
        except CheckpointError as error:
            self._under_way = None
            self._failed(step, error)
            return
        if report is not None:
            self._under_way = None
            self._say(_told(report))

    def finish(self, is_last: bool) -> None:
        """Wait for the save under way, if there is one. is_last: no save comes after it, so that its failure is an error."""
        if self._under_way is None:
            if is_last and self._failure is not None:
                raise self._failure
            return
        under_way, self._under_way = self._under_way, None
        try:
            self._say(_told(under_way.finish()))
        except CheckpointError as error:
            if is_last:
                raise
            self._failed(under_way.step, error)

    def _failed(self, step: int, error: CheckpointError) -> None:
        if self._flags.exit_on_save_failure:
            raise error
        self._failure = error
        self._say(f"the save of step {step} FAILED: {error}; training goes on and saves again when it is due")


def _told(report: SaveReport) -> str:
    if report.remark:
        return report.remark
    beside = (
        "" if report.waited_seconds is None else f" beside the training, which waited {report.waited_seconds:.2f} s"
    )
    removed = f"; removed {', '.join(path.name for path in report.removed)}" if report.removed else ""
    return f"saved {report.path} ({human_bytes(report.num_bytes)} in {report.seconds:.1f} s{beside}){removed}"

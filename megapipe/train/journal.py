"""`Journal`: everything a run reports: run.jsonl for `megapipe report`, lines at the console, metrics to their writers.

run.jsonl says what a run is and how it went, one JSON object per line; a resumed run appends. Keys are stable. Every
record has `kind` and `time` (Unix seconds), and:

start    host, pid, command, versions, machine, grid, config (YAML), plan (text), remarks, kernels (which library
         computes what)
resumed  path: the checkpoint that was loaded
note     printed at the console between the steps: checkpoints, profiles, checkpoints passed over
warning  something that did not go as asked and did not stop the run
stragglers  step, told (sentences), slowest (times of ranks): with --log-straggler, where a rank was slow
rollback number, from_step, to_step, first_sample, past_sample, reason, account: back to before a spike
failure  rank, error, text: the error that ended the run
end      step, reason, early
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megapipe.config.config import Config
from megapipe.errors import CommunicationError, NoProgressError, SaveRefusedError
from megapipe.train.metrics import Console, JsonLines, Metrics, Registered, TensorBoard, WeightsAndBiases, Writer

FILE_NAME = "run.jsonl"


class Journal:
    """The reports of one rank. Rank 0 prints, writes metrics and records everything; others record only their failure.

    folder: of run.jsonl, None to record nothing. A disk that refuses writes costs the record, and a writer that fails
    is left out from then on; neither stops training.
    """

    def __init__(self, folder: Path | None, global_rank: int = 0) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._rank, self._is_quiet, self._is_begun = global_rank, False, False
        self.writers: list[Writer] = []

    def open_writers(self, config: Config) -> None:
        """Open the configured writers, on rank 0. Raises ConfigError if a package is missing or a path fails."""
        if self._rank != 0:
            return
        logging, folder = config.logging, recorded_folder(config)
        self._is_quiet = logging.quiet
        if not logging.quiet:
            self.writers.append(Console())
        if folder is not None:
            self.writers.append(JsonLines(Path(logging.metrics_file or folder / "metrics.jsonl")))
        if logging.tensorboard_dir:
            self.writers.append(TensorBoard(logging.tensorboard_dir))
        if logging.wandb_project:
            name, directory = logging.wandb_exp_name, logging.wandb_save_dir
            project, entity = logging.wandb_project, logging.wandb_entity
            self.writers.append(WeightsAndBiases(project, name, directory, asdict(config), entity))
        self.writers += [Registered(name, config) for name in logging.logger]

    def write(self, metrics: Metrics) -> None:
        self._each_writer(lambda writer: writer.write(metrics))

    def close(self) -> None:
        self._each_writer(lambda writer: writer.close())

    def say(self, *lines: str) -> None:
        """Print lines at the console, and record each, on rank 0."""
        if self._rank != 0:
            return
        for text in lines:
            print(text, flush=True)
            self.record("note", text=text)

    def progress(self, text: str) -> None:
        """Print a line on rank 0 that soon is of no interest, and so is not recorded."""
        if self._rank == 0 and not self._is_quiet:
            print(text, flush=True)

    def record(self, kind: str, **values: Any) -> None:
        """Append a line to run.jsonl, on rank 0."""
        if self._rank == 0:
            self._write(kind, **values)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Record what is raised inside the block, and let it through. A lost peer is recorded by rank 0 alone.

        Nothing is recorded where another run saves in the folder.
        """
        try:
            yield
        except SaveRefusedError:
            raise
        except BaseException as error:
            if self._rank == 0 or not isinstance(error, CommunicationError):
                self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the run, on any rank."""
        if self._path is not None and self._path.parent.is_dir():  # a run that never began leaves no folder
            self._write("failure", rank=self._rank, error=type(error).__name__, text=str(error))

    def _each_writer(self, call: Callable[[Writer], None]) -> None:
        for writer in tuple(self.writers):
            try:
                call(writer)
            except Exception as error:  # a full disk, a lost server: training is worth more than its metrics
                self.writers.remove(writer)
                why = f"{type(error).__name__}: {error}"
                name = getattr(writer, "name", type(writer).__name__)
                text = f"{name} stopped: {why}; training continues without it"
                print(text, file=sys.stderr)
                self.record("warning", text=text)

    def _write(self, kind: str, **record: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"kind": kind, "time": time.time(), **record}) + "\n"
        try:
            if not self._is_begun:  # later, a folder that is missing was moved
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._is_begun = True
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)  # one write, so that lines of several ranks do not mix
        except OSError as error:
            print(f"{self._path} cannot be written to: {error.strerror}; the run continues without it", file=sys.stderr)
            self._path = None


def last_failure(folder: Path, since: float) -> str | None:
    """Return in one line what ended the newest run in a folder that failed after `since` (Unix seconds), or None."""
    try:
        lines = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # torn by a crash
            continue
        # a start that was refused for lack of progress was no run
        if record.get("kind") == "failure" and record["time"] >= since and record["error"] != NoProgressError.__name__:
            return f"{record['error']}: {record['text']}".splitlines()[0]
    return None


def run_folder(config: Config) -> Path:
    """Return the folder for files that no flag names: --save, else that of --metrics-file, else the current one."""
    if config.checkpoint.save:
        return Path(config.checkpoint.save)
    return Path(config.logging.metrics_file).parent if config.logging.metrics_file else Path()


def recorded_folder(config: Config) -> Path | None:
    """Return the folder of run.jsonl: that of the metrics, None for a run that writes none."""
    if config.logging.metrics_file:
        return Path(config.logging.metrics_file).parent
    return Path(config.checkpoint.save) if config.checkpoint.save else None

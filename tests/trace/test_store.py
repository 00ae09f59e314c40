"""Traces are kept between processes of a user, and only there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.environment import cache_folder
from megapipe.layers.table import Kept
from megapipe.schedule.action import Op
from megapipe.trace import store
from megapipe.trace.store import TraceStore, user_store
from megapipe.trace.traced import Message, Product, Traced
from tests.harness import REPOSITORY

PLAN = """
import sys, json
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from tests.tiny import tiny_config
plan = resolve(tiny_config(pipeline_model_parallel_size=2, global_batch_size=4), 2)
print(json.dumps([[dict(rank.items) for rank in all_rank_memory(plan)], "torch" in sys.modules]))
"""


def planned(home: Path, **more: str) -> tuple[list[dict[str, int]], bool]:
    """Return the planned memory of a new process, and if it has imported torch."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(REPOSITORY), **more}
    command = [sys.executable, "-c", PLAN]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    items, has_torch = json.loads(done.stdout)
    return items, has_torch


def test_a_second_process_reads_what_the_first_has_traced_without_torch(tmp_path: Path) -> None:
    first, has_torch = planned(tmp_path)
    assert has_torch
    files = list(tmp_path.glob("megapipe/traces/*/*.json"))
    assert files
    assert planned(tmp_path) == (first, False)
    for file in files[1:]:
        file.write_text("{")  # cut off by a full disk
    assert planned(tmp_path) == (first, True)
    assert planned(tmp_path) == (first, False)


def test_ranks_of_a_job_and_folders_that_cannot_be_written_are_done_without(tmp_path: Path) -> None:
    of_job, has_torch = planned(tmp_path, RANK="0", WORLD_SIZE="2")
    assert has_torch and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert planned(tmp_path / "file") == (of_job, True)


def test_the_folder_is_that_of_xdg_or_of_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative"):  # the XDG specification lets a relative path be ignored
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == tmp_path / ".cache" / "megapipe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / "megapipe"


def test_other_sources_have_other_traces_and_unused_ones_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources, root = tmp_path / "sources", tmp_path / "cache" / "traces"
    (sources / "extras").mkdir(parents=True)
    monkeypatch.setattr(store, "PACKAGE", sources)
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "cache")
    for text in ("a", "b"):
        (sources / "model.py").write_text(text)
        user_store.cache_clear()
        assert user_store().data("what", lambda text=text: text) == text
    (sources / "extras" / "report.py").touch()  # traces do not depend on it
    user_store.cache_clear()
    assert user_store().data("what", lambda: "c") == "b"
    for folder in root.iterdir():
        os.utime(folder, (0, 0))
    (sources / "model.py").write_text("c")
    user_store.cache_clear()
    user_store()
    assert len(list(root.iterdir())) == 1
    user_store.cache_clear()


def test_with_an_extension_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store.EXTENSIONS, "loaded", {"mine.py": None})
    assert [TraceStore(tmp_path).data("what", lambda n=n: n) for n in (1, 2)] == [1, 2]
    assert not list(tmp_path.iterdir())


def test_a_trace_is_the_same_after_json() -> None:
    product = Product("linear_fc1", Op.I, True, False, 2, 3, 1, 1, 4)
    message = Message("linear_fc1", Op.F, False, "tp", "all_gather", 1, 64)
    kept = (Kept("linear_fc1", 8, 2),)
    sizes, levels = range(1, 10), ((8,), (9, 10), (), (11, 12), (13,))
    traced = Traced(kept, *sizes, *levels, True, (product,), (message,))
    assert Traced.of_data(json.loads(json.dumps(traced.as_data()))) == traced

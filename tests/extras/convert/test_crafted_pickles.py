"""Checkpoint files from other programs that try to run code when read: none of it runs, in any format."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.errors import CheckpointError, MegapipeError
from megapipe.extras.convert.pickled import StandIn, load_pickled, read_folder


class Crafted:
    """Object that pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


CALLS: dict[str, Callable[[Path], Crafted]] = {
    "os.system": lambda path: Crafted(os.system, f"touch {path}"),
    "subprocess.run": lambda path: Crafted(subprocess.run, ["touch", str(path)]),
    "open": lambda path: Crafted(builtins.open, str(path), "w"),
    "eval": lambda path: Crafted(eval, f"open({str(path)!r}, 'w')"),
    "Path.touch": lambda path: Crafted(Path.touch, path),
    "torch.save": lambda path: Crafted(torch.save, 1, str(path)),
    "torch.hub.load": lambda path: Crafted(torch.hub.load_state_dict_from_url, f"file://{path}"),
    "getattr": lambda path: Crafted(getattr, Crafted(argparse.Namespace), "__init__"),
    "inside a namespace": lambda path: Crafted(argparse.Namespace, Crafted(os.system, f"touch {path}")),
}
FILES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "zip of torch": lambda content: _saved(content, True),
    "old file of torch": lambda content: _saved(content, False),
    "bare pickle": pickle.dumps,
}


def _saved(content: dict[str, Any], as_zip: bool) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=as_zip)
    return file.getvalue()


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_crafted_checkpoint_runs_nothing(
    call: Callable[[Path], Crafted], file: Callable[[Any], bytes], tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "model_optim_rng.pt"
    path.write_bytes(file({"model": {"weight": torch.ones(2)}, "args": call(mark)}))
    with contextlib.suppress(CheckpointError):
        content = load_pickled(path)["args"]  # an inert placeholder was read in its place
        assert isinstance(content, StandIn | argparse.Namespace)
    assert not mark.exists()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_crafted_metadata_runs_nothing(call: Callable[[Path], Crafted], tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(call(mark)))
    with pytest.raises(MegapipeError, match="metadata"):
        read_folder(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_the_crafted_files_do_run_in_an_unrestricted_reader(file: Callable[[Any], bytes], tmp_path: Path) -> None:
    """Show that the files above are harmful to an unrestricted reader."""
    mark = tmp_path / "ran"
    path = tmp_path / "file"
    path.write_bytes(file({"args": CALLS["os.system"](mark)}))
    pickle.loads(path.read_bytes()) if file is pickle.dumps else torch.load(path, weights_only=False)
    assert mark.exists()

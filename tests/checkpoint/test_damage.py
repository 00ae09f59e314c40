"""Damage to a saved checkpoint is detected and named when the checkpoint is opened or read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.folder import find_checkpoint, open_folder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.manifest import Manifest
from megapipe.checkpoint.shard import TensorBox
from megapipe.errors import CheckpointError
from megapipe.extras.inspect.checkpoint import damage
from megapipe.sharding.boxes import Box
from tests.checkpoint.layouts import LAYOUTS, WORLD, Layout, global_tensors, newest, save_layout, save_one

REPOSITORY = Path(__file__).resolve().parents[2]
SHARD = "rank_00000.safetensors"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_of_any_tensor_names_file_and_tensor(tmp_path: Path) -> None:
    wholes = global_tensors()
    layout = Layout(2, 2, 16)
    path = save_layout(tmp_path, layout, wholes, block_bytes=40).path
    folder = newest(tmp_path)
    for name, tensor in folder.manifest.tensors.items():
        for saved in tensor.boxes:
            for position in (saved.start, saved.start + 4 * saved.box.num_elements - 1):
                flip(path / SHARD, position)
                with pytest.raises(CheckpointError, match=rf"{SHARD}, tensor {name}@.* is damaged: .* checksum"):
                    load_tensors(folder, [box for _, box in layout.held(wholes)], WORLD)
                flip(path / SHARD, position)
    load_tensors(folder, [box for _, box in layout.held(wholes)], WORLD)


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        (
            SHARD,
            lambda path: path.write_bytes(path.read_bytes()[:-3]),
            rf"step_00000002 is damaged: {SHARD} has \d+ bytes, expected \d+",
        ),
        (SHARD, Path.unlink, rf"step_00000002 is incomplete: {SHARD} is missing"),
        ("config.yaml", Path.unlink, r"config.yaml is missing"),
        ("manifest.json", Path.unlink, r"step_00000002 is not a complete checkpoint: it has no manifest.json"),
        (
            "manifest.json",
            lambda path: path.write_bytes(path.read_bytes()[:-40]),
            r"step_00000002/manifest.json is damaged",
        ),
    ],
    ids=["truncated_shard", "deleted_shard", "deleted_configuration", "deleted_manifest", "truncated_manifest"],
)
def test_an_incomplete_checkpoint_is_passed_over_with_a_remark_unless_asked_for(
    tmp_path: Path, name: str, harm, message: str
) -> None:  # type: ignore[no-untyped-def]
    save_one(tmp_path, 1)
    harm(save_one(tmp_path, 2).path / name)
    found = newest(tmp_path)
    assert found.step == 1
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(found.remarks[0])
    assert "latest names step_00000002; the newest complete checkpoint is step_00000001" in found.remarks[1]
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path, 2)


def test_if_nothing_complete_is_left_that_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    (save_one(tmp_path, 1).path / SHARD).unlink()
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint:\n.*rank_00000.safetensors is missing"):
        find_checkpoint(tmp_path)


def test_a_step_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"--ckpt-step 3: .*step_00000003.*step_00000001"):
        find_checkpoint(tmp_path, 3)


def test_without_a_checkpoint_the_newest_is_none(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "nothing") is None


def test_every_flipped_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    content = (save_one(tmp_path, 1).path / "manifest.json").read_bytes()
    whole = Manifest.from_json(content.decode(), "here")
    messages = []
    for position in range(len(content)):
        flipped = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        try:
            # only a change of white space may go unnoticed
            assert Manifest.from_json(flipped.decode(), "here") == whole, position
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > len(content) * 0.9
    assert all(message.startswith("here ") for message in messages)


def test_a_manifest_is_its_own_json(tmp_path: Path) -> None:
    save_layout(tmp_path, LAYOUTS["tp2_shards4_vocabulary16"], global_tensors())
    manifest = newest(tmp_path).manifest
    assert Manifest.from_json(manifest.to_json(), "here") == manifest


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = save_one(tmp_path, 1).path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "other"}))
    with pytest.raises(CheckpointError, match=r"is not the manifest of a megapipe checkpoint"):
        open_folder(path.parent)


def test_a_file_cut_while_it_is_read_is_called_truncated(tmp_path: Path) -> None:
    shard = save_one(tmp_path, 1).path / SHARD
    folder = newest(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=rf"{SHARD}, tensor master/w@0,0 is truncated: the file ends at byte \d+"):
        load_tensors(folder, [TensorBox("master/w", (5, 4), Box((0, 0), (5, 4)), torch.zeros(20))], WORLD)


def test_verify_finds_a_flipped_byte_anywhere(tmp_path: Path) -> None:
    path = save_layout(tmp_path, Layout(2, 2, 16), global_tensors(), block_bytes=40).path
    folder = newest(tmp_path)
    assert list(damage(folder)) == []
    for name, positions in ((SHARD, range(0, (path / SHARD).stat().st_size, 37)), ("config.yaml", range(6))):
        for position in positions:
            flip(path / name, position)
            (line,) = damage(folder)
            assert line.startswith(str(path / name))
            flip(path / name, position)


def test_the_tool_lists_and_verifies(tmp_path: Path) -> None:
    path = save_layout(tmp_path, Layout(1, 3, 16), global_tensors()).path

    def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "tools/inspect_checkpoint.py", str(tmp_path), *arguments]
        return subprocess.run(
            command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
        )

    listed = tool("--tensors", "--verify")
    assert listed.returncode == 0 and "all checksums hold" in listed.stdout
    assert "master/down  F32 [6, 8]  192 bytes in" in listed.stdout and "step 1, 6 tensors" in listed.stdout
    flip(path / "config.yaml", 2)
    found = tool("--verify")
    assert found.returncode == 1 and "config.yaml: the content is damaged" in found.stderr
    assert "has no step_00000005; it holds step_00000001" in tool("--step", "5").stderr


def test_a_checkpoint_is_looked_into_without_torch() -> None:
    script = "import sys, megapipe.extras.inspect.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0

"""Checkpoints that were crafted or mixed up end in one message: never a traceback, a hang, or a start from step 0."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import (
    Rollback,
    checkpoint_config,
    find_checkpoint,
    move_abandoned,
    open_folder,
    prepare_root,
    read_latest,
    read_rollbacks,
    saved_config,
    write_rollback,
)
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.save import Extras, save_checkpoint
from megapipe.checkpoint.shard import DTYPES, TensorBox
from megapipe.checkpoint.starts import count_start
from megapipe.errors import CheckpointError, DamageError, NewerVersionError
from megapipe.extras.convert.hugging_face import stored_tensors
from megapipe.train.loading import load
from megapipe.train.state import Schedules, TrainingState
from tests.checkpoint.layouts import WORLD, newest, save_one, whole_box
from tests.train.runs import runtime_of, save

SHARD = "rank_00000.safetensors"
Change = Callable[[dict[str, Any]], object]


def rewrite(folder: Path, change: Change) -> None:
    """Change the content of a manifest, and its checksum."""
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    change(whole["content"])
    text = json.dumps(whole["content"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(whole | {"crc32": zlib.crc32(text.encode())}))


def box(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["master/w"]["boxes"][0]


def twice(content: dict[str, Any]) -> None:
    content["tensors"]["master/w"]["boxes"] *= 2


CRAFTED: dict[str, tuple[Change, str]] = {
    "absolute": (lambda c: c["files"].update({"/etc/hostname": {"bytes": 3, "crc32": 0}}), "not inside the folder"),
    "parent": (lambda c: c["files"].update({"../x": {"bytes": 3, "crc32": 0}}), "not inside the folder"),
    "no_name": (lambda c: c["files"].update({"": {"bytes": 3, "crc32": 0}}), "not inside the folder"),
    "box_elsewhere": (lambda c: box(c).update(file="../other"), r"are not in '../other'"),
    "box_past_the_end": (lambda c: box(c).update(start=1 << 40), r"are not in 'rank_00000"),
    "double_box": (twice, "overlap: two ranks own the same elements"),
    "missing_box": (lambda c: c["tensors"]["master/w"].update(boxes=[]), "only 0 of its 20 elements"),
    "box_outside": (lambda c: box(c).update(offset=[1, 0]), r"is not within shape \[5, 4\]"),
    "dimensions": (lambda c: box(c).update(offset=[0]), "a box has other dimensions"),
    "three_dimensions": (lambda c: c["tensors"]["master/w"].update(shape=[5, 4, 1]), "3 dimensions"),
    "negative": (lambda c: box(c).update(offset=[-1, 0]), "-1 is not a whole number of at least 0"),
    "huge": (lambda c: box(c).update(start=1 << 63), "is not a whole number"),
    "text_for_a_number": (lambda c: c.update(step="1"), "'1' is not a whole number"),
    "fraction": (lambda c: c.update(step=1.0), "1.0 is not a whole number"),
    "truth": (lambda c: c.update(world_size=True), "True is not a whole number"),
    "no_blocks": (lambda c: c.update(block_bytes=0), "0 is not a whole number of at least 1"),
    "dtype": (lambda c: c["tensors"]["master/w"].update(dtype="F7"), "has dtype 'F7'"),
    "dtype_of_another_kind": (lambda c: c["tensors"]["master/w"].update(dtype=["F32"]), "damaged: TypeError"),
    "checksums": (lambda c: box(c).update(crc32=[]), "0 checksums for 80 bytes"),
    "state": (lambda c: c.update(state=[]), "its state is no object"),
    "files": (lambda c: c.update(files=[]), "damaged: AttributeError"),
    "boxes": (lambda c: c["tensors"]["master/w"].update(boxes={"a": 1}), "damaged: TypeError"),
    "step": (lambda c: c.update(step=7), "its manifest.json is of step 7"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_manifest_ends_in_one_message(tmp_path: Path, name: str) -> None:
    change, message = CRAFTED[name]
    folder = save_one(tmp_path, 1).path
    rewrite(folder, lambda content: None)
    assert open_folder(folder).step == 1
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        open_folder(folder)


def test_deeply_nested_json_is_damage(tmp_path: Path) -> None:
    folder = save_one(tmp_path, 1).path
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="damaged: RecursionError"):
        open_folder(folder)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL: dict[str, Callable[[Path], None]] = {"pipe": pipe, "device": to_device, "folder": Path.mkdir}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["manifest.json", "config.yaml", SHARD])
def test_a_special_file_is_named_and_not_waited_for(tmp_path: Path, kind: str, name: str) -> None:
    path = save_one(tmp_path, 1).path / name
    path.unlink()
    SPECIAL[kind](path)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is not a regular file"):
        open_folder(path.parent)


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_beside_the_checkpoints_are_not_waited_for(tmp_path: Path, kind: str) -> None:
    save_one(tmp_path, 1)
    (tmp_path / "latest").unlink()
    SPECIAL[kind](tmp_path / "latest")
    SPECIAL[kind](tmp_path / "rollbacks.json")
    assert read_latest(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"rollbacks.json .*not a regular file"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("entry", ['[{"number": "1"}]', "[1]", '{"a": 1}', "[" * 100_000])
def test_rollbacks_of_wrong_types_end_in_one_message(tmp_path: Path, entry: str) -> None:
    (tmp_path / "rollbacks.json").write_text(entry)
    with pytest.raises(CheckpointError, match=r"rollbacks.json cannot be read"):
        read_rollbacks(tmp_path)


def test_a_rollback_to_a_word_is_of_the_wrong_type(tmp_path: Path) -> None:
    write_rollback(tmp_path, Rollback(1, 4, 2, 0, 8, "a spike", 0.0, {}), Disk())
    text = (tmp_path / "rollbacks.json").read_text()
    (tmp_path / "rollbacks.json").write_text(text.replace('"to_step": 2', '"to_step": "2"'))
    with pytest.raises(CheckpointError, match="values of wrong types"):
        read_rollbacks(tmp_path)


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A folder whose newest checkpoint, of step 3, has a later format version."""
    for step in (1, 2, 3):
        save_one(tmp_path, step)
    path = tmp_path / "step_00000003" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2, "content": "unknown"}))
    return tmp_path


def test_a_newer_version_is_refused_and_neither_passed_over_nor_changed(newer: Path) -> None:
    before = sorted(newer.rglob("*"))
    refusal = r"step_00000003/manifest.json has format version 2; this megapipe reads version 1"
    for act in (
        lambda: find_checkpoint(newer),
        lambda: find_checkpoint(newer, 3),
        lambda: prepare_root(newer, 2),
        lambda: prepare_root(newer, 2, [3]),
        lambda: checkpoint_config(newer),
    ):
        with pytest.raises(NewerVersionError, match=refusal):
            act()
    with pytest.raises(CheckpointError, match=refusal):
        save_one(newer, 3)
    assert [path for path in sorted(newer.rglob("*")) if ".tmp-" not in path.name] == before
    count_start(newer, None, False)
    write_rollback(newer, Rollback(1, 4, 1, 0, 8, "a spike", 0.0, {}), Disk())
    with pytest.raises(NewerVersionError, match=refusal):
        move_abandoned(newer)
    with pytest.raises(CheckpointError, match=rf"step_00000004 is complete, but then: .*{refusal}"):
        save_one(newer, 4, keep_last=1)
    assert (newer / "step_00000003").is_dir()
    older = find_checkpoint(newer, 2)  # which was asked for by name
    assert older is not None and older.step == 2


def unreadable(path: Path) -> Iterator[Path]:
    raise PermissionError(13, "Permission denied")


def test_a_single_checkpoint_or_a_folder_of_runs_is_not_taken_for_a_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = save_one(tmp_path / "runs" / "a", 4).path
    with pytest.raises(CheckpointError, match=rf"single checkpoint.*; give {tmp_path}/runs/a and --ckpt-step 4"):
        find_checkpoint(step)
    with pytest.raises(CheckpointError, match=rf"runs holds no checkpoint, but {tmp_path}/runs/a does; give that"):
        find_checkpoint(tmp_path / "runs")
    with pytest.raises(CheckpointError, match="is a single checkpoint"):
        prepare_root(step, 0)
    renamed = step.rename(tmp_path / "renamed")
    with pytest.raises(CheckpointError, match=rf"renamed is a single checkpoint.*; give {tmp_path}$"):
        find_checkpoint(renamed)
    with pytest.raises(CheckpointError, match="latest is not a folder"):
        find_checkpoint(tmp_path / "runs" / "a" / "latest")
    monkeypatch.setattr(Path, "iterdir", unreadable)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/runs cannot be read: Permission denied"):
        find_checkpoint(tmp_path / "runs")
    monkeypatch.undo()
    (tmp_path / "empty" / "abandoned-1" / "step_00000001").mkdir(parents=True)
    assert find_checkpoint(tmp_path / "empty") is None and find_checkpoint(tmp_path / "nothing") is None


def test_the_configuration_is_compared_with_its_checksum_wherever_it_is_read(tmp_path: Path) -> None:
    folder = save_one(tmp_path, 1).path
    path = folder / "config.yaml"
    path.write_bytes(b"x" * path.stat().st_size)
    for read in (lambda: checkpoint_config(tmp_path), lambda: saved_config(open_folder(folder))):
        with pytest.raises(CheckpointError, match=r"config.yaml .*checksum"):
            read()


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", 3])
def test_an_index_of_hugging_face_names_files_inside_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="weight_map"):
        stored_tensors(tmp_path)


STATES: dict[str, Change] = {
    "no_training": lambda c: c["state"].pop("training"),
    "another_step": lambda c: c["state"]["training"].update(step=1),
    "words": lambda c: c["state"]["training"].update(consumed_samples="many"),
    "schedules": lambda c: c["state"].update(schedules={"lr": 1}),
    "optimizer": lambda c: c["state"].update(optimizer=[1]),
    "account": lambda c: c["state"].update(account=[1]),
    "data": lambda c: c["state"].update(data={"kind": "other"}),
}


def test_state_of_other_kinds_ends_in_one_message(tmp_path: Path) -> None:
    runtime = runtime_of(0, 1)
    schedules, state = Schedules.of(runtime.plan.config), TrainingState(step=2, consumed_samples=16)
    path = save(runtime, state, schedules, tmp_path).path / "manifest.json"
    content, data = path.read_bytes(), {"kind": "files", "members": []}
    for name, change in STATES.items():
        rewrite(path.parent, change)
        with pytest.raises(CheckpointError, match="understood"):
            pytest.fail(f"{name}: {load(runtime, tmp_path, data=data)}")
        path.write_bytes(content)
    assert load(runtime, tmp_path, data=data).state == state


def exchanged(content: dict[str, Any]) -> None:
    """Exchange two tensors of one shape, with their places and checksums."""
    tensors = content["tensors"]
    tensors["master/w"], tensors["master/v"] = tensors["master/v"], tensors["master/w"]


def exchanged_header(folder: Path) -> None:
    """Exchange them in the file, whose header has another checksum then."""
    path = folder / SHARD
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[:end].replace(b"master/w", b"master/x").replace(b"master/v", b"master/w")
    path.write_bytes(header.replace(b"master/x", b"master/v") + content[end:])
    rewrite(folder, lambda c: c["files"][SHARD].update(crc32=zlib.crc32(path.read_bytes()[:end])))


@pytest.mark.parametrize("where", ["manifest", "header", "both"])
def test_exchanged_tensors_of_one_shape_are_refused(tmp_path: Path, where: str) -> None:
    values = {f"master/{name}": torch.full((5, 4), number) for name, number in (("v", 1.0), ("w", 2.0))}
    boxes = [TensorBox(name, (5, 4), whole_box(each), each.view(-1)) for name, each in values.items()]
    folder = save_checkpoint(tmp_path, 1, boxes, Extras({"training": {"step": 1}}, ""), WORLD).path
    if where != "header":
        rewrite(folder, exchanged)
    if where != "manifest":
        exchanged_header(folder)
    read = torch.empty(20)
    wanted = [TensorBox("master/w", (5, 4), whole_box(values["master/w"]), read)]
    if where == "both":  # renamed consistently
        load_tensors(open_folder(folder), wanted, WORLD)
        assert read.eq(1.0).all()
        return
    with pytest.raises(DamageError, match=r"master/w@0,0: .*manifest .*header"):
        load_tensors(open_folder(folder), wanted, WORLD)


@pytest.mark.parametrize(
    "damage", [b"\xff" * 8, b"\0" * 8, b"\x08" + b"\0" * 7 + b"[1, 2]  "], ids=["huge", "empty", "list"]
)
def test_a_damaged_header_ends_in_one_message(tmp_path: Path, damage: bytes) -> None:
    path = save_one(tmp_path, 1).path / SHARD
    path.write_bytes(damage + path.read_bytes()[len(damage) :])
    values = torch.empty(5, 4)
    with pytest.raises(DamageError, match="its header is damaged"):
        load_tensors(newest(tmp_path), [TensorBox("master/w", (5, 4), whole_box(values), values.view(-1))], WORLD)


def test_tensors_of_an_older_version_are_read() -> None:
    folder = open_folder(Path(__file__).parents[1] / "golden" / "run" / "step_00000003")
    for name, saved in folder.manifest.tensors.items():
        values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        assert load_tensors(folder, [TensorBox(name, saved.shape, whole_box(values), values.view(-1))], WORLD)

"""A checkpoint does not depend on the layout that wrote it.

Every layout loads the files of every other one bit-exactly and reads only the blocks that it needs.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file

from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.manifest import check_covered
from megapipe.checkpoint.save import Extras, save_checkpoint
from megapipe.checkpoint.shard import TensorBox
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box
from tests.checkpoint.layouts import (
    LAYOUTS,
    VOCABULARY,
    WORLD,
    Layout,
    global_tensors,
    newest,
    save_layout,
    save_one,
    whole_box,
)


@pytest.mark.parametrize("block_bytes", [8, 56, 1 << 22], ids=["blocks_of_8", "blocks_of_56", "blocks_of_4_mib"])
@pytest.mark.parametrize("writer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_loads_every_other(tmp_path: Path, writer: Layout, block_bytes: int) -> None:
    wholes = global_tensors()
    save_layout(tmp_path, writer, wholes, block_bytes=block_bytes)
    blank = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    for reader in LAYOUTS.values():
        wanted = [box for _, box in reader.held(blank)]
        load_tensors(newest(tmp_path), wanted, WORLD)
        for box in wanted:
            there = wholes[box.name.removeprefix("master/")][box.box.slices]
            assert torch.equal(box.values.view(box.box.shape), there), (reader, box)


def test_files_are_safetensors_with_boxes_by_name(tmp_path: Path) -> None:
    wholes = global_tensors()
    report = save_layout(tmp_path, Layout(2, 1, 14), wholes)
    tensors = load_file(report.path / "rank_00000.safetensors")
    assert torch.equal(tensors["master/embedding@0,0"], wholes["embedding"][:7])
    assert torch.equal(tensors["master/down@0,4"], wholes["down"][:, 4:])
    assert torch.equal(tensors["master/norm@0"], wholes["norm"])


def test_vocabulary_padding_is_neither_written_nor_filled(tmp_path: Path) -> None:
    save_layout(tmp_path, Layout(4, 2, 20), global_tensors())
    saved = newest(tmp_path).manifest.tensors["master/embedding"]
    assert saved.shape == (VOCABULARY, 6)
    assert sum(box.box.num_elements for box in saved.boxes) == VOCABULARY * 6


@pytest.mark.parametrize(
    "saved", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=["fp64", "fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize(
    "wanted_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=["fp64", "fp32", "bf16", "fp16"]
)
def test_dtypes_widen_exactly_or_are_refused(tmp_path: Path, saved: torch.dtype, wanted_dtype: torch.dtype) -> None:
    values = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(saved)
    save_one(tmp_path, 1, values)
    wanted = TensorBox("master/w", (7, 3), whole_box(values), torch.zeros(21, dtype=wanted_dtype))
    exact = (
        torch.equal(values.to(wanted_dtype).to(saved), values)
        and torch.finfo(wanted_dtype).max >= torch.finfo(saved).max
    )
    if exact:
        load_tensors(newest(tmp_path), [wanted], WORLD)
        assert torch.equal(wanted.values.view(7, 3), values.to(wanted_dtype))
    else:
        with pytest.raises(CheckpointError, match=r"master/w "):
            load_tensors(newest(tmp_path), [wanted], WORLD)


def test_a_few_rows_cost_a_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4000.0).view(1000, 4)
    box = TensorBox("master/w", (1000, 4), whole_box(values), values.reshape(-1))
    save_checkpoint(tmp_path, 1, [box], Extras({}, ""), WORLD, block_bytes=64)
    read: list[int] = []
    original = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, start: read.append(sum(map(len, buffers))) or original(fd, buffers, start)
    )
    wanted = TensorBox("master/w", (1000, 4), Box((501, 1), (2, 2)), torch.zeros(4))
    load_tensors(newest(tmp_path), [wanted], WORLD)
    assert wanted.values.tolist() == [2005.0, 2006.0, 2009.0, 2010.0]
    assert sum(read) == 64


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("master/v", (5, 4), r"holds no tensor master/v"),
        ("master/w", (5, 8), r"master/w has shape \[5, 4\], but this model's has \[5, 8\]"),
    ],
    ids=["missing", "shape"],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, name: str, shape: tuple[int, int], message: str) -> None:
    save_one(tmp_path, 1)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(newest(tmp_path), [TensorBox(name, shape, Box((0, 0), (1, 4)), torch.zeros(4))], WORLD)


@st.composite
def cuts(draw: st.DrawFn, box: Box | None = None, depth: int = 4) -> list[Box]:
    """Draw a rectangle cut into smaller rectangles at random positions."""
    if box is None:
        box = Box((0, 0), (draw(st.integers(1, 9)), draw(st.integers(1, 9))))
    dim = draw(st.integers(0, 1))
    if depth == 0 or box.shape[dim] == 1:
        return [box]
    at = draw(st.integers(1, box.shape[dim] - 1))
    low, high = list(box.shape), list(box.shape)
    low[dim], high[dim] = at, box.shape[dim] - at
    offset = list(box.offset)
    offset[dim] += at
    parts = Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))
    return [piece for part in parts for piece in draw(cuts(part, depth - 1))]


@settings(max_examples=60)
@given(cuts(), st.randoms(use_true_random=False))
def test_a_hole_and_an_overlap_are_found_in_any_cut(boxes: list[Box], random) -> None:  # type: ignore[no-untyped-def]
    shape = tuple(max(box.offset[dim] + box.shape[dim] for box in boxes) for dim in range(2))
    random.shuffle(boxes)
    check_covered("w", shape, boxes)
    with pytest.raises(CheckpointError, match=r"w: only \d+ of its \d+ elements"):
        check_covered("w", shape, boxes[1:])
    with pytest.raises(CheckpointError, match="overlap"):
        check_covered("w", shape, [*boxes, random.choice(boxes)])
    with pytest.raises(CheckpointError, match="is not within shape"):
        check_covered("w", (shape[0], shape[1] - 1), boxes) if shape[1] > 1 else check_covered(
            "w", (shape[0] - 1, shape[1]), boxes
        )


def test_a_box_missing_from_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    wholes = global_tensors()
    layout = LAYOUTS["tp2_shards1_vocabulary14"]
    save_layout(tmp_path, layout, wholes)
    folder = newest(tmp_path)
    down = folder.manifest.tensors["master/down"]
    tensors = dict(folder.manifest.tensors) | {"master/down": dataclasses.replace(down, boxes=down.boxes[1:])}
    holed = dataclasses.replace(folder, manifest=dataclasses.replace(folder.manifest, tensors=tensors))
    with pytest.raises(CheckpointError, match=r"master/down .*\[6, 8\] .*24"):
        load_tensors(holed, [box for primary, box in layout.held(wholes) if primary], WORLD)

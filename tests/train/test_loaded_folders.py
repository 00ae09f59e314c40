"""Copies of a Hugging Face folder that differ between ranks: named at the start, or by the check of copies."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.environment import read_environment
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.snapshot import read_checkpoint
from megapipe.plan.resolve import resolve
from megapipe.train.facts import TENSOR_BLOCK_BYTES, config_facts
from megapipe.train.run import Job, pretrain
from tests.harness import RankPool
from tests.train.jobs import job

MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 8 --vocab-size 64 "
    "--make-vocab-size-divisible-by 4 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1e-2 --mock-data --num-workers 0 --eval-iters 0 --train-iters 1 --device cpu"
)
TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loaded")
    code, said = job(f"{MODEL} --save {root}/run", base="")
    assert code == 0, said
    hugging_face.write(read_checkpoint(root / "run"), root / "whole")
    return root / "whole"


def change(weights: Path, first: float, past: float) -> None:
    """Write zeros over a range of TENSOR, given as shares of its bytes."""
    content = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])[TENSOR]["data_offsets"]
    assert end - begin > 8 * TENSOR_BLOCK_BYTES
    part = slice(start + begin + int(first * (end - begin)), start + begin + int(past * (end - begin)))
    content[part] = bytes(part.stop - part.start)
    weights.write_bytes(content)


def start(rank: int, world_size: int, folders: tuple[str, str], more: str) -> str:
    """Start a run from a folder of each rank's own; return type and text of its error."""
    words = f"{MODEL} --finetune --load {folders[rank]} {more}"
    loaded, weights = hugging_face.start_from(load_config(words.split()))
    environment = dataclasses.replace(
        read_environment({}), global_rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
    )
    plan = resolve(loaded.config, world_size)
    try:
        pretrain(Job(plan, environment, loaded.text(plan.config), weights=weights))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("first", "past", "kind"),
    [
        pytest.param(0.0, 1.0, "DisagreementError", id="a tensor of zeros"),
        pytest.param(0.5, 1.0, "DisagreementError", id="half a tensor"),
        pytest.param(0.2, 0.3, "TrainingError", id="between the blocks"),
        pytest.param(0.0, 0.0, "", id="an equal copy"),
    ],
)
def test_weights_that_differ_on_one_rank_are_named_as_what_was_loaded(
    first: float, past: float, kind: str, folder: Path, tmp_path: Path, rank_pools: Callable[[int], RankPool]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change(copy / "model.safetensors", first, past)
    more = "--check-weight-hash-across-dp-replicas-interval 100"
    found = rank_pools(2).run(start, (str(folder), str(copy)), more)
    assert {text.partition(":")[0] for text in found} == {kind}, found
    assert all("--load" in text for text in found if kind), found
    if kind == "TrainingError":
        assert "layers.1.mlp" in found[0], found


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]", b"[" * 99999])
def test_a_damaged_file_is_compared_too(name: str, content: bytes, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / name).write_bytes(content)
    facts = [
        config_facts(load_config(f"{MODEL} --finetune --load {load}".split()).config, {})["--load"].value
        for load in (folder, tmp_path / "copy")
    ]
    assert facts[0] != facts[1]

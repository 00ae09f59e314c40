"""Conversion to torch.distributed.checkpoint, which itself reads the written files."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import Rollback, write_rollback
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError
from megapipe.extras.cli.convert import main
from megapipe.extras.convert import dcp_run
from megapipe.extras.convert.pickled import read_folder
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, read_checkpoint, write_checkpoint
from tests.extras.convert.test_megatron import LLAMA_MODEL, drawn, in_memory

MODEL = dataclasses.replace(LLAMA_MODEL, num_layers=1)  # 61 rows of vocabulary do not divide evenly over ranks
EMBEDDING, Q = "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_qkv.weight"


def a_run() -> Snapshot:
    """Build a run with fp32 masters and moments at step 7, of which one step was skipped."""
    model = drawn(MODEL)
    tensors = {}
    for number, key in enumerate(("master", "exp_avg", "exp_avg_sq")):
        for name, tensor in model.weights.items():
            tensors[f"{key}/{name}"] = in_memory(tensor.detach().float() + number / 3)
    training = {"step": 7, "consumed_samples": 56, "consumed_tokens": 900, "skipped_steps": 1}
    optimizer = {"num_steps": 6, "loss_scaler": {"scale": 512.0, "good_steps": 3, "overflows_left": 2}, "rule": "adam"}
    schedules = {"lr": {"max_lr": 1e-3, "style": "cosine", "wsd_style": None}}
    account = {"skipped_samples": [[8, 16], [40, 44]], "rollbacks": 2, "discarded_samples": 12, "discarded_tokens": 384}
    spikes = {"seen": {"loss": [1.5, 1.25], "gradient norm": []}, "num_spiking": 1}
    state = model.state | {
        "account": account,
        "spikes": spikes,
        "global_batch_size": 8,
        "training": training,
        "optimizer": optimizer,
        "random": {"seed": 5},
        "schedules": schedules,
    }
    return dataclasses.replace(model, tensors=tensors, state=state)


def mapped(content: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to each tensor of a nested state dict."""
    if isinstance(content, dict):
        return {key: mapped(value, change) for key, value in content.items()}
    return change(content.detach()) if isinstance(content, torch.Tensor | LazyTensor) else content


def blank(content: Any) -> Any:
    """Return a nested dict with None for each value."""
    return {key: blank(value) for key, value in content.items()} if isinstance(content, dict) else None


def test_torch_loads_what_is_written_into_a_plain_state_dict(tmp_path: Path) -> None:
    snapshot, folder = a_run(), tmp_path / "out"
    write_checkpoint(snapshot, tmp_path / "ours")
    assert main([str(tmp_path / "ours"), str(folder), "--to", "dcp"]) == 0
    wanted = mapped(dcp_run.state_dict(snapshot), torch.Tensor.clone)
    found = mapped(wanted, torch.zeros_like) | {"train_state": blank(wanted["train_state"])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert found["train_state"] == wanted["train_state"]
    assert {section: found["train_state"][section] for section in dcp_run.SECTIONS} == {
        section: snapshot.state[section] for section in dcp_run.SECTIONS
    }
    assert (folder / "config.yaml").read_text() == to_yaml(snapshot.config)
    assert found["model"].keys() == wanted["model"].keys() and found["model"][EMBEDDING].shape[0] == 61, "no padding"
    assert all(torch.equal(found["model"][name], value) for name, value in wanted["model"].items())
    for name, state in wanted["optimizer"]["state"].items():
        assert state.keys() == {"exp_avg", "exp_avg_sq", "step"} and state["step"] == 6
        assert all(torch.equal(found["optimizer"]["state"][name][key], value) for key, value in state.items())
    assert {"optimizer.state." + Q + ".exp_avg", "model." + Q} <= read_folder(folder)[0].keys()
    with pytest.raises(CheckpointError, match="out already exists; converting never overwrites"):
        dcp_run.write(snapshot, folder)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Each tensor is read when it is written; the ones before it are freed by that time."""
    size, count = 1 << 16, 8
    seen: list[tuple[int, int]] = []  # at each read: tensors written so far, and earlier tensors still alive
    alive: set[int] = set()

    def read() -> torch.Tensor:
        written = sum(path.stat().st_size for path in tmp_path.glob(".out.tmp-*/*.distcp"))
        seen.append((written // (size * 4), len(alive)))
        number, tensor = len(seen), torch.ones(size)
        alive.add(number)
        weakref.finalize(tensor.untyped_storage(), alive.discard, number)
        return tensor

    tensors = {f"master/{number}": LazyTensor((size,), torch.float32, read) for number in range(count)}
    dcp_run.write(dataclasses.replace(drawn(MODEL), tensors=tensors), tmp_path / "out")
    assert [written for written, _ in seen] == list(range(count))
    assert max(others for _, others in seen) <= 1


def test_samples_skipped_since_the_checkpoint_stay_skipped(tmp_path: Path) -> None:
    """The run rolled back to the checkpoint and ended before it saved again.

    The file of the rollback next to the checkpoint holds the samples to skip from there.
    """
    snapshot = a_run()
    write_checkpoint(snapshot, tmp_path)
    account = snapshot.state["account"] | {"skipped_samples": [[8, 16], [40, 44], [68, 92]], "rollbacks": 3}
    write_rollback(tmp_path, Rollback(3, 10, 7, 68, 92, "a spike", 0.0, account), Disk())
    assert read_checkpoint(tmp_path).state["account"] == account
    write_rollback(tmp_path, Rollback(4, 10, 6, 60, 92, "another", 0.0, account | {"rollbacks": 4}), Disk())
    given_up = read_checkpoint(tmp_path / "step_00000007")
    assert given_up.state["account"] == snapshot.state["account"]


def test_a_folder_of_torch_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dcp_run.write(a_run(), tmp_path / "out")
    assert main([str(folder), str(tmp_path / "back")]) == 1
    assert f"{folder} holds no args of Megatron" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()

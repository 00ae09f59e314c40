"""Conversion to and from torch.distributed.checkpoint.

torch itself reads the written files and writes, sharded, the files to read.
"""

from __future__ import annotations

import dataclasses
import json
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
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.cli.convert import guess, main
from megapipe.extras.convert import dcp_run
from megapipe.extras.convert.pickled import read_folder
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, read_checkpoint, write_checkpoint
from tests.extras.convert.test_megatron import LLAMA_MODEL, Bomb, differing, drawn, explode, in_memory
from tests.harness import RankPool

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


def truth(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in snapshot.tensors.items()}


def mapped(content: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to each tensor of a nested state dict."""
    if isinstance(content, dict):
        return {key: mapped(value, change) for key, value in content.items()}
    return change(content.detach()) if isinstance(content, torch.Tensor | LazyTensor) else content


def save_plainly(content: dict[str, Any], folder: Path) -> Path:
    """Save as a program without ranks does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(mapped(content, torch.Tensor.clone), checkpoint_id=folder, no_dist=True)
    (folder / "config.yaml").write_text(to_yaml(a_run().config))
    return folder


def test_torch_loads_what_is_written_into_a_plain_state_dict(tmp_path: Path) -> None:
    snapshot = a_run()
    folder = dcp_run.write(snapshot, tmp_path / "out")
    wanted = mapped(dcp_run.state_dict(snapshot), torch.Tensor.clone)
    found = mapped(wanted, torch.zeros_like) | {"train_state": {"step": 0, "consumed_samples": 0, "skipped_steps": 0}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert found["train_state"] == {"step": 7, "consumed_samples": 56, "skipped_steps": 1}
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


def test_there_and_back_by_command_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = a_run()
    write_checkpoint(snapshot, tmp_path / "ours")
    assert main([str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "dcp"]) == 0
    assert guess(tmp_path / "out") == "dcp"
    assert main([str(tmp_path / "out"), str(tmp_path / "back")]) == 0, capsys.readouterr().err
    again = read_checkpoint(tmp_path / "back")
    assert differing(again, truth(snapshot)) == []
    kept = ("training", "optimizer", "random", "schedules", "precision", "account", "spikes", "global_batch_size")
    assert {key: again.state[key] for key in kept} == {key: json.loads(json.dumps(snapshot.state))[key] for key in kept}
    assert again.config == read_checkpoint(tmp_path / "ours").config


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


def _save_sharded(rank: int, world_size: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    content = dcp_run.state_dict(a_run())
    del content["train_state"]["optimizer"], content["train_state"]["consumed_tokens"]
    content["train_state"]["step"] = torch.tensor(7)
    content["lr_scheduler"] = {"last_epoch": 7}
    sharded = mapped(
        content,
        lambda values: distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None) if values.ndim else values,
    )
    dcp.save(sharded, checkpoint_id=folder)


def test_what_torch_saved_from_two_ranks_is_read_whole(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-7"
    rank_pools(2).run(_save_sharded, str(folder))
    assert len(list(folder.glob("*.distcp"))) == 2 and guess(tmp_path / "run") == "dcp"
    with pytest.raises(ConfigError, match=r"has no config.yaml.*give --config FILE"):
        dcp_run.read(tmp_path / "run")
    config = tmp_path / "model.yaml"
    config.write_text(to_yaml(a_run().config))
    found = dcp_run.read(tmp_path / "run", None, config)
    assert differing(found, truth(a_run())) == []
    assert found.state["training"] == {
        "step": 7,
        "consumed_samples": 56,
        "consumed_tokens": 56 * 16,
        "skipped_steps": 1,
    }
    assert (found.state["optimizer"]["num_steps"], found.state["optimizer"]["rule"]) == (6, "adam")
    assert found.remarks == ("not read, set by flags of the resumed run: lr_scheduler",)
    weights = dcp_run.read(tmp_path / "run", 7, config, weights_only=True)
    assert weights.tensors.keys() == {f"master/{name}" for name in found.weights} and weights.step == 0
    with pytest.raises(CheckpointError, match="of step 8"):
        dcp_run.read(tmp_path / "run", 8, config)


def _change(content: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = path.split("/")
    for section in sections:
        content = content[section]
    content.update({last: value}) if value is not None else content.pop(last)


HARM: dict[str, tuple[str, Any, str]] = {
    "unknown": ("model/extra.weight", torch.zeros(2), "the tensor model.extra.weight has no place in the model"),
    "unknown_state": (
        f"optimizer/state/{Q}/max_exp_avg_sq",
        torch.zeros(2),
        f"the tensor optimizer.state.{Q}.max_exp_avg_sq has no place",
    ),
    "missing": (f"model/{Q}", None, f"lacks the tensor model.{Q}, which its configuration requires"),
    "missing_moment": (f"optimizer/state/{Q}/exp_avg", None, f"lacks the tensor optimizer.state.{Q}.exp_avg"),
    "shape": (f"model/{Q}", torch.zeros(3, 3), rf"model.{Q} has shape \[3, 3\], its configuration requires \[32, 16\]"),
    "steps": (f"optimizer/state/{Q}/step", torch.tensor(2.0), r"different numbers of updates: \[2, 6\]"),
    "bomb": ("train_state/step", Bomb(explode), r"train_state.step cannot be read: .*explode"),
}


@pytest.mark.parametrize(("path", "value", "message"), HARM.values(), ids=HARM.keys())
def test_what_has_no_place_or_is_not_plain_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, value: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content = mapped(dcp_run.state_dict(a_run()), torch.Tensor.clone)
    _change(content, path, value)
    with pytest.raises(CheckpointError, match=message):
        dcp_run.read(save_plainly(content, tmp_path / "theirs"))
    assert not (tmp_path / "exploded").exists()


def test_weights_at_the_top_of_the_state_dict_are_read_and_a_position_that_is_not_there_is_said(tmp_path: Path) -> None:
    snapshot = a_run()
    content = dcp_run.state_dict(snapshot)
    found = dcp_run.read(save_plainly({**content["model"], "optimizer": content["optimizer"]}, tmp_path / "theirs"))
    assert differing(found, truth(snapshot)) == []
    assert found.step == 6 and "no train_state.consumed_samples" in found.remarks[0]

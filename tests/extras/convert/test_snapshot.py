"""Tensors of a conversion are in memory one at a time, and samples skipped in the meantime stay skipped."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path

import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import Rollback, write_rollback
from megapipe.extras.convert.dcp_files import save_state_dict
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, read_checkpoint, write_checkpoint
from tests.extras.convert.test_megatron import LLAMA_MODEL, drawn, in_memory

MODEL = dataclasses.replace(LLAMA_MODEL, num_layers=1)  # 61 rows of vocabulary do not divide evenly over ranks


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


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Each tensor of a folder of torch.distributed.checkpoint is read when it is written; the ones before it are freed
    by that time.
    """
    size, count = 1 << 16, 8
    seen: list[tuple[int, int]] = []  # at each read: tensors written so far, and earlier tensors still alive
    alive: set[int] = set()

    def read() -> torch.Tensor:
        written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
        seen.append((written // (size * 4), len(alive)))
        number, tensor = len(seen), torch.ones(size)
        alive.add(number)
        weakref.finalize(tensor.untyped_storage(), alive.discard, number)
        return tensor

    save_state_dict({str(number): LazyTensor((size,), torch.float32, read) for number in range(count)}, tmp_path)
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

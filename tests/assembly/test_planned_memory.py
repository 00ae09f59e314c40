"""A step of real ranks uses the planned bytes.

Compared are weights, gradients, optimizer states, and the activations at the peak of the step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.assembly.microbatches import Keys
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.model.microbatch import Microbatch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.memory import SliceBytes, peak_of_row, rank_memory, stage_activation_bytes
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.train.step import train_step
from tests.harness import RankPool
from tests.model.grids import with_ahead
from tests.tiny import tiny_config
from tests.train.runs import FOUR_LAYERS

UNEVEN = {"pipeline_model_parallel_layout": "Ettt|tt|t|L", "num_layers": 6}
UNLIKE: dict[str, Any] = {
    "device": "cpu",  # CUDA's kernel for fp32 and several query groups keeps its output twice
    "norm_position": "after",
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "layer_pattern": (
        "1 qk_layernorm_scope=projection",
        "1 attention=none ffn_hidden_size=32",
        "1 norm_position=around num_query_groups=2",
        "1 mlp=none",
    ),
}
NARROW = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
PREDICTIONS = {"mtp_num_layers": 2, "position_embedding_type": "rope", "kv_channels": 4}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "predictions_pp2_untied": (2, {"pipeline_model_parallel_size": 2} | PREDICTIONS),
    "predictions_pp2_zb_v_tied": (
        2,
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "untie_embeddings_and_output_weights": False}
        | PREDICTIONS,
    ),
    "one_rank_4_chunks": (1, UNEVEN),
    "one_rank_4_chunks_tied": (1, UNEVEN | {"untie_embeddings_and_output_weights": False}),
    "pp2_by_cost": (2, {"pipeline_model_parallel_size": 2}),
    "pp2_2_chunks": (2, UNEVEN | {"pipeline_model_parallel_size": 2}),
    "pp2_gpipe_tied": (
        2,
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "gpipe", "untie_embeddings_and_output_weights": False},
    ),
    "dualpipe_tied": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "dualpipe",
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "dualpipe_zero1": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "dualpipe",
            "use_distributed_optimizer": True,
            "ddp_bucket_size": 500,
        },
    ),
    "dualpipe_v": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "dualpipe-v",
            "num_virtual_stages_per_pipeline_rank": 2,
        },
    ),
    "chunked_loss_tied": (1, UNEVEN | {"untie_embeddings_and_output_weights": False, "cross_entropy_chunk_size": 5}),
    "chunked_loss_tp2_sequence_parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "cross_entropy_chunk_size": 5},
    ),
    "pipedream": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "pipedream", "clip_grad": 0.0}),
    "2bw_zero1": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "pipedream-2bw",
            "clip_grad": 0.0,
            "use_distributed_optimizer": True,
        },
    ),
    "narrow_state_pp2_zero1": (4, NARROW | {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "pp2_zero2": (4, {"pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads"}),
    "pp2_units_of_zero3_in_instances": (
        8,
        {
            "pipeline_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "data_parallel_sharding_units": 2,
            "num_distributed_optimizer_instances": 2,
        },
    ),
    "narrow_state_pipedream": (
        2,
        NARROW | {"pipeline_model_parallel_size": 2, "pipeline_schedule": "pipedream", "clip_grad": 0.0},
    ),
    "unlike_layers_pp2": (2, UNLIKE | {"pipeline_model_parallel_size": 2}),
    "unlike_layers_tp2_sequence_parallel_pp2": (
        4,
        UNLIKE | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "tp2_sequence_parallel_zero1_pp2_2_chunks": (
        8,
        UNEVEN
        | {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "ddp_bucket_size": 500,
        },
    ),
}


def make_plan(world_size: int, dtype: str, **changes: Any) -> RunPlan:
    untied = {"untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "global_batch_size": 24}
    per_node = changes.pop("ranks_per_node", None)
    return resolve(tiny_config(**FOUR_LAYERS | untied | {"dtype": dtype} | changes), world_size, per_node)


class LivePeak:
    """The peak of the bytes in distinct storages that autograd saves for the backward.

    Counts activations, but not parameters, integer tensors and scalars.
    """

    def __init__(self, excluded: list[Tensor]) -> None:
        self.most = self._now = 0
        self._excluded = {
            tensor.untyped_storage()._cdata for tensor in excluded
        }  # sharded weights change their address
        self._holders: Counter[int] = Counter()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> _Held:
        held, storage = _Held(tensor), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if (
            (tensor.is_floating_point() or tensor.dtype == torch.bool)
            and storage._cdata not in self._excluded
            and size > 8
        ):
            self._now += size * (not self._holders[address])
            self._holders[address] += 1
            self.most = max(self.most, self._now)
            weakref.finalize(held, self._released, address, size)
        return held

    def _released(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        self._now -= size * (not self._holders[address])


class _Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def measured(rank: int, world_size: int, dtype: str, changes: dict[str, Any]) -> dict[str, int]:
    """Run a step and return the bytes of each kind on this rank."""
    plan = make_plan(world_size, dtype, **changes)
    runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))
    buffers = [buffer for stage in runtime.buffers.values() for buffer in stage.buffers]
    generator = torch.Generator().manual_seed(rank)
    count = plan.batch.full // plan.batch.samples_per_microbatch
    keys = Keys(1, 2, runtime.coordinates.dp_rank, plan.topology.dp)
    tokens = [torch.randint(29, (2, 8), generator=generator) for _ in range(count)]
    microbatches = [Microbatch(each, labels=each.clone(), dropout_key=keys.of(k)) for k, each in enumerate(tokens)]
    microbatches = [with_ahead(each, runtime.num_ahead) for each in microbatches]
    versions = [version for buffer in buffers for version in buffer.versions]
    masks = [ahead.loss_mask for each in microbatches for ahead in each.ahead if ahead.loss_mask is not None]
    peak, step = LivePeak([*versions, *masks]), train_step(runtime)
    with peak.hooks:
        if plan.is_synchronous:
            step.gradients(microbatches).sum()
        else:
            step.run(microbatches, Rates(1e-2, 0.0))
    held = runtime.optimizer.held()
    return {
        "weights": _bytes([kept for buffer in buffers for kept in buffer.kept_parameters]),
        "gradients": _bytes([buffer.kept_gradients for buffer in buffers]),
        "optimizer": _bytes(held["optimizer"]),
        "activations": peak.most,
    }


def _bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", GRIDS)
def test_a_step_takes_the_bytes_in_the_plan(name: str, dtype: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, changes = GRIDS[name]
    plan = make_plan(world_size, dtype, **changes)
    found = rank_pools(world_size).run(measured, dtype, changes)
    for rank, real in enumerate(found):
        pp_rank = plan.topology.coordinates(rank).pp_rank
        planned = dict(rank_memory(plan, pp_rank).items)
        kept = {stage: sum(stage_activation_bytes(plan, stage).values()) for stage in plan.placement.stages_of(pp_rank)}
        schedule = plan.schedule(plan.batch.full // plan.batch.samples_per_microbatch)
        # peak of activations alone
        peak = peak_of_row(schedule.rows[pp_rank], pp_rank, plan.placement, [SliceBytes(kept, kept, {}, 0)], 2)
        assert real == {what: planned[what] for what in ("weights", "gradients", "optimizer")} | {
            "activations": peak.activation_bytes
        }
        coming_and_going = sum(planned[item] for item in ("activations", "messages", "recompute", "temporaries"))
        assert planned["activations"] <= peak.activation_bytes <= coming_and_going

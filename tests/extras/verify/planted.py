"""Bugs that can occur on a grid but not in one process, planted into megapipe's code inside a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.comm.collectives import Work
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.data.batch import Batch
from megapipe.data_parallel import stores
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.extras.verify import parity
from megapipe.extras.verify.compare import gradient_pieces
from megapipe.model import context_parallel, norm
from megapipe.model.microbatch import SliceKeys
from megapipe.pipeline.engine import Engine
from megapipe.plan import resolve, run_plan
from megapipe.sharding.spec import Interval, ParamSpec
from megapipe.trace.parameters import model_parameters
from megapipe.train.step import LossAverage, PendingLoss

Plant = Callable[[pytest.MonkeyPatch, int], None]  # (patch, global rank)


def norm_without_tp_sum(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Leave out the sum over tp of a norm's gradient: under sequence parallelism each tp_rank sees a slice of the
    sequence."""
    _forget_partial_gradient(patch, "input_layernorm")


def qk_norm_without_tp_sum(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Leave out the sum over tp of a q-norm's gradient: each tp_rank sees its own heads."""
    _forget_partial_gradient(patch, "q_layernorm")


def projection_norm_without_tp_sum(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Leave out the sum over tp in the backward of a norm over all heads: each tp_rank has its own heads."""
    backward = norm._ProjectionRMSNorm.backward

    def planted(ctx: Any, grad: Tensor) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(norm, "all_reduce", lambda tensor, group: None)
            return backward(ctx, grad)

    patch.setattr(norm._ProjectionRMSNorm, "backward", staticmethod(planted))


def _forget_partial_gradient(patch: pytest.MonkeyPatch, which: str) -> None:
    def planted(*arguments: Any) -> tuple[ParamSpec, ...]:
        return tuple(
            dataclasses.replace(spec, partial_gradient=spec.partial_gradient and f".{which}." not in spec.name)
            for spec in model_parameters(*arguments)
        )

    patch.setattr(resolve, "model_parameters", planted)
    patch.setattr(run_plan, "model_parameters", planted)


def key_value_head_without_sum(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Leave out the sum over the replicas of a key/value head: each sees its own query heads."""

    def planted(self: ParamSpec, interval: Interval) -> bool:
        return self.partial_gradient

    patch.setattr(ParamSpec, "needs_replica_sum", planted)


def tied_embedding_summed_twice(patch: pytest.MonkeyPatch, rank: int) -> None:
    once = stores.all_reduce

    def planted(tensor: Tensor, group: Group, **options: Any) -> Work:
        if group.name == "embedding":
            once(tensor, group, **options).wait()
        return once(tensor, group, **options)

    patch.setattr(stores, "all_reduce", planted)


def dropped_microbatch(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Drop the last microbatch from every row."""
    build = Engine.__init__

    def planted(self: Engine, schedule: Any, *args: Any, **kwargs: Any) -> None:
        build(self, schedule, *args, **kwargs)
        last = self.num_units - 1
        self.row = tuple(action for action in self.row if action.microbatch != last)
        self._acts = tuple(each for each in self._acts if each.action.microbatch != last)

    patch.setattr(Engine, "__init__", planted)


def second_holder_forgotten(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Keep the gradients of the second direction on their rank, without the sum over both holders of a stage."""
    of = Sharing.of

    def planted(groups: ProcessGroups, *level: Any) -> Sharing:
        return of(dataclasses.replace(groups, replicas=groups.dp_cp), *level)

    patch.setattr(Sharing, "of", planted)


def divisor_without_dp(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Divide gradients, which are sums over dp (here the world), by the denominator of a single replica."""
    right = PendingLoss.denominator_of
    patch.setattr(
        PendingLoss, "denominator_of", lambda self, tokens: right(self, tokens) / torch.distributed.get_world_size()
    )


def loss_scale_misread(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Multiply losses with half of the loss scale that the optimizer divides by."""
    scale = LossAverage.objective

    def planted(self: LossAverage, loss_scale: Callable[[], float]) -> Any:
        return scale(self, lambda: 0.5 * loss_scale())

    patch.setattr(LossAverage, "objective", planted)


def shards_not_gathered(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(Stores, "start_gather", lambda self: None)


def one_rank_differs(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Make the gradient of one layer wrong on the last rank only."""
    finish = Stores.finish_gradients

    def planted(self: Stores) -> None:
        finish(self)
        for buffers in self.stages.values():
            for name in buffers.names:
                if name.endswith("mlp.linear_fc2.weight"):
                    buffers.main_grad(name)[0, 0] += 1.0

    if rank == torch.distributed.get_world_size() - 1:
        patch.setattr(Stores, "finish_gradients", planted)


def gradient_left_out(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Leave a part of the gradients out of the comparison itself."""
    patch.setattr(parity, "gradient_pieces", lambda runtime: list(gradient_pieces(runtime))[1:])


def loss_divided_by_tokens_of_a_shard(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Divide the loss by the tokens of this cp rank, not by those of the whole sequences."""
    part = Batch.part
    patch.setattr(Batch, "part", lambda self, held: dataclasses.replace(part(self, held), loss_tokens=None))


def gradients_of_keys_of_earlier_slices_lost(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Leave out what later slices add to the gradients of a slice's keys and values."""
    gradients = SliceKeys.gradients
    patch.setattr(SliceKeys, "gradients", lambda *arguments: torch.zeros_like(gradients(*arguments)))


def gradients_of_keys_not_sent_back(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Leave the gradients of other ranks' keys and values where they were computed."""
    patch.setattr(context_parallel._RingSums, "done", lambda self, source: None)

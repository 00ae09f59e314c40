"""torch's `fully_shard` as a second oracle of ZeRO-3: results, messages and gathered bytes of both in one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm import collectives
from megapipe.comm.groups import build_process_groups
from megapipe.data.batch import Batch
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.reference.train import build_optimizer
from megapipe.extras.verify.compare import gradient_pieces
from megapipe.extras.verify.oracle import drawn_slices, random_batches, reference_config, share_of, whole_weights
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.sharded import row_bytes
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.tiny import LLAMA, make_config

NUM_LAYERS, MICROBATCHES, DP = 3, 2, 2
LR, DECAY, EPS = 0.02, 0.0, 1e-3
GATHER, SCATTER = "all_gather", "reduce_scatter"


class Messages(TorchDispatchMode):
    """Counts gathers and reduce-scatters, and the bytes of their whole tensors, of whichever code issues them."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("c10d"):
            name = func._schema.name.replace("_", "")
            kind = GATHER if "allgather" in name else SCATTER if "reducescatter" in name else ""
            if kind:
                tensors = [each for each in args if isinstance(each, Tensor)]
                self.count[kind] += 1
                self.bytes[kind] += max(each.nbytes for each in tensors)
        return func(*args, **(kwargs or {}))


@contextmanager
def resized(only: Collection[int] = ()) -> Iterator[list[int]]:
    """Yield [most bytes] of storages that are allocated by resizing, as whole weights are in both. only: of these."""
    sizes: dict[int, int] = {}
    found, resize = [0], torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if not only or storage._cdata in only:
            sizes[storage._cdata] = size
            found[0] = max(found[0], sum(sizes.values()))
        return result

    torch.UntypedStorage.resize_ = counted  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def make_plan() -> RunPlan:
    config = make_config(
        **LLAMA,
        num_layers=NUM_LAYERS,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=4,
        seq_length=8,
        vocab_size=32,
        make_vocab_size_divisible_by=1,
        micro_batch_size=2,
        global_batch_size=2 * MICROBATCHES * DP,
        dtype="fp64",
        adam_eps=EPS,
        clip_grad=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        data_parallel_sharding_strategy="optim_grads_params",
        data_parallel_sharding_granularity="microbatch",
        data_parallel_sharding_prefetch=0,
        data_parallel_sharding_units=NUM_LAYERS,
        device="cpu",
    )
    return resolve(config, DP)


Pieces = list[tuple[str, tuple[slice, ...], Tensor]]  # name, place in the whole tensor, values
Counted = tuple[dict[str, int], dict[str, int], int]  # messages and their bytes by kind, most bytes of whole weights


def of_megapipe(rank: int, plan: RunPlan, batch: list[Batch]) -> tuple[Pieces, Counted]:
    """Run a step; return this rank's pieces of averaged gradients and updated weights, and what was counted."""
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"), drawn_slices(1, torch.float64))
    flat = [buffer for held in runtime.buffers.values() for buffer in held.buffers]
    weights = {buffer.parameters.untyped_storage()._cdata for buffer in flat}
    microbatches, step = share_of(runtime, batch, 0), TrainStep(runtime)
    # over gloo our reductions run in place, as all-reduces; other backends have reduce-scatters
    not_in_place = mock.patch.object(collectives, "_is_in_place", return_value=False)
    with not_in_place, Messages() as messages, resized(weights) as most:
        pending = step.gradients(microbatches)
    factor = 1.0 / pending.denominator_of(pending.summed.num_tokens)
    found: Pieces = [
        (f"gradient {held.piece.spec.name}", held.piece.box.slices, (held.values * factor).view(held.piece.box.shape))
        for held in gradient_pieces(runtime)
    ]
    runtime.optimizer.step(factor, Rates(LR, DECAY), False, pending.totals)
    for is_first, box in runtime.held_weights("weight"):
        assert is_first  # nobody else has this shard
        found.append((box.name.replace("/", " ", 1), box.box.slices, box.values.view(box.box.shape).clone()))
    return found, (dict(messages.count), dict(messages.bytes), most[0])


def of_torch(rank: int, plan: RunPlan, batch: list[Batch]) -> tuple[dict[str, Tensor], Counted]:
    """Run the same step with fully_shard over each layer; return whole averaged gradients and weights by name."""
    model = ReferenceGPT(reference_config(plan.config)).double()
    model.load_state_dict(whole_weights(plan.specs, drawn_slices(1, torch.float64)))
    mesh = init_device_mesh("cpu", (DP,))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    betas = plan.config.optimizer.adam_beta1, plan.config.optimizer.adam_beta2
    optimizer = build_optimizer(model, "adamw", weight_decay=DECAY, betas=betas, eps=EPS, momentum=0.0)
    for group in optimizer.param_groups:
        group["lr"] = LR
    with Messages() as messages, resized() as most:
        for k in range(MICROBATCHES):
            part = batch[k * DP + rank]
            tokens, labels = torch.from_numpy(part.tokens), torch.from_numpy(part.labels)
            loss, count = model(tokens, labels, torch.ones_like(tokens))
            (loss / count / MICROBATCHES).backward()  # fully_shard averages over its ranks
    found = {f"gradient {name}": each.grad.full_tensor() for name, each in model.named_parameters()}
    optimizer.step()
    found |= {f"weight {name}": each.full_tensor().detach() for name, each in model.named_parameters()}
    return found, (dict(messages.count), dict(messages.bytes), most[0])


def both(rank: int, world_size: int) -> tuple[list[str], dict[str, int], Counted, Counted]:
    """Return what differs, how many elements of each tensor were compared, and what was counted of both."""
    plan = make_plan()
    (batch,) = random_batches(plan.config, DP, [MICROBATCHES], seed=1)
    held, of_ours = of_megapipe(rank, plan, list(batch))
    whole, of_theirs = of_torch(rank, plan, list(batch))
    wrong, compared = [], Counter[str]()
    for name, place, values in held:
        compared[name] += values.numel()
        if (values - whole[name][place]).abs().max() > 1e-10 * whole[name].abs().max():
            wrong.append(f"{name} {place}")
    return wrong, dict(compared), of_ours, of_theirs


def test_a_step_equals_fully_shard_with_fewer_messages(rank_pools: Callable[[int], RankPool]) -> None:
    plan = make_plan()
    row = plan.schedule(MICROBATCHES).rows[0]
    planned = row_bytes(plan, 0, row)
    units = [sum(layout.numel for layout in plan.buffers(stage, 0)) for stage in range(NUM_LAYERS)]
    layer = sum(spec.num_elements for spec in plan.specs if spec.name.startswith("decoder.layers.0."))
    total = sum(spec.num_elements for spec in plan.specs)
    compared: Counter[str] = Counter()
    for wrong, elements, (ours, our_bytes, our_most), (theirs, their_bytes, their_most) in rank_pools(DP).run(both):
        assert not wrong
        compared.update(elements)
        # every unit in forwards and backwards, but the last one, whose backward follows its forward, once
        assert ours == {GATHER: MICROBATCHES * (2 * NUM_LAYERS - 1), SCATTER: MICROBATCHES * NUM_LAYERS}
        assert ours == {GATHER: planned.gathers, SCATTER: planned.reductions}
        assert our_bytes[GATHER] == 8 * MICROBATCHES * (2 * sum(units) - units[-1]) == 8 * planned.gathered
        assert our_bytes[SCATTER] == 8 * MICROBATCHES * sum(units) == 8 * planned.reduced
        assert our_most == max(units) * 8 == planned.peak.weights
        # torch's root, embedding and head, stays whole until its backward has ended
        assert theirs == {GATHER: MICROBATCHES * (2 * NUM_LAYERS + 1), SCATTER: MICROBATCHES * (NUM_LAYERS + 1)}
        assert their_bytes[GATHER] == 8 * MICROBATCHES * (total + NUM_LAYERS * layer)
        assert their_most > our_most
    sizes = {spec.name: spec.num_elements for spec in plan.specs}
    assert compared == {f"{what} {name}": size for what in ("gradient", "weight") for name, size in sizes.items()}

"""Each rank's pieces of the model's tensors against the whole tensors of the oracle, and how far they may differ.

So are the experts that every token chose: a token that chooses another one changes every later number by far more than
rounding does, so that the first tensor that differs says little about the cause. Compared are sets of experts: their
order is that of scores, which two equal ones may exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.assembly.compose import parameter_dtype
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import broadcast
from megapipe.comm.groups import Group
from megapipe.config.config import Config, ResolvedConfig
from megapipe.config.layers import expert_layers
from megapipe.extras.reference.experts import MoE as PlainMoE
from megapipe.model.context import Unit
from megapipe.sharding.boxes import Box, Piece, pieces
from megapipe.sharding.spec import Fused, ParamSpec, QueryGroups
from megapipe.sharding.state_dtypes import state_dtypes
from megapipe.trace.parameters import model_states


@dataclass(frozen=True)
class OtherChoice:
    """One token that chose other experts on the grid."""

    layer: int
    microbatch: int  # of the global batch
    sequence: int  # of the microbatch
    token: int  # of the sequence
    grid: tuple[int, ...]
    plain: tuple[int, ...]


@dataclass(frozen=True)
class Routing:
    """The choices of one rank's tokens in one step. first: by layer, microbatch and token; None if all are the same."""

    num_choices: int = 0
    num_other: int = 0
    first: OtherChoice | None = None


NO_CHOICES = Routing()  # of a model without experts


class PlainChoices:
    """The choices in the oracle's model during one step, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        self._chosen: list[list[Tensor]] = []
        for module in model.modules():
            if isinstance(module, PlainMoE):
                self._chosen.append([])
                module.register_forward_hook(partial(self._keep, self._chosen[-1]))

    def _keep(self, kept: list[Tensor], module: nn.Module, inputs: Any, output: Any) -> None:
        assert isinstance(module, PlainMoE) and module.chosen is not None
        if not module.sets.collects:  # a pass that only counts, before the one that is differentiated
            kept.append(module.chosen)

    def take(self) -> Tensor:
        """Return the choices since the last call [layers with experts, microbatches, b, s, k] int64."""
        taken = torch.stack([torch.stack(kept) for kept in self._chosen])
        for kept in self._chosen:
            kept.clear()
        return taken


Chosen = dict[tuple[int, Unit], Tensor]  # experts by layer and microbatch of the global batch


class GridChoices:
    """The choices of this rank's routers during one step, by layer and microbatch of the global batch.

    A replay of recompute chooses again, in place of the first choice.
    """

    def __init__(self, runtime: TrainingRuntime) -> None:
        self._runtime = runtime
        self._chosen: Chosen = {}
        for module in runtime.stages.values():
            for number, router in module.routers().items():
                router.register_forward_hook(partial(self._keep, number))

    def _keep(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        context = inputs[1]  # of Router.forward
        self._chosen[layer, context.unit] = output[1].detach()

    def take(self) -> Chosen:
        """Return the choices of a step, and forget them."""
        chosen, self._chosen = self._chosen, {}
        return chosen

    def compare(self, chosen: Chosen, plain: Tensor) -> Routing:
        """Return what differs from the oracle's choices. chosen: the grid's. plain: see PlainChoices.take."""
        plan, place = self._runtime.plan, self._runtime.coordinates
        held = []  # positions of each slice on this rank
        for of_slice in plan.slices:
            runs = self._runtime.sequence_part.runs(of_slice)
            positions = torch.cat([torch.arange(run.start, run.stop) for run in runs])
            held.append(positions.chunk(plan.topology.tp)[place.tp_rank].to(plain.device))
        layers = expert_layers(plan.config.model)
        num_choices = num_other = 0
        first: OtherChoice | None = None
        for (layer, (microbatch, number)), grid in sorted(chosen.items(), key=lambda item: item[0]):
            whole = plain[layers.index(layer), microbatch].transpose(0, 1)  # [s, b, k]
            own = whole[held[number]]
            grid, own = grid.view(own.shape).sort(-1).values, own.sort(-1).values
            other = (grid != own).any(-1)
            num_choices += other.numel()
            num_other += int(other.sum())
            if first is None and other.any():
                position, sequence = other.nonzero()[0].tolist()
                both = (tuple(each[position, sequence].tolist()) for each in (grid, own))
                first = OtherChoice(layer, microbatch, sequence, int(held[number][position]), *both)
        return Routing(num_choices, num_other, first)


def broadcast_choices(
    choices: Tensor | None, config: ResolvedConfig, num_microbatches: int, world: Group, device: torch.device
) -> Tensor:
    """Return the oracle's choices, which rank 0 has, on every rank."""
    model = config.model
    shape = (len(expert_layers(config.model)), num_microbatches, config.training.micro_batch_size, model.seq_length)
    everywhere = torch.empty(*shape, model.moe_router_topk, dtype=torch.int64, device=device)
    if choices is not None:
        everywhere.copy_(choices)
    broadcast(everywhere, world)
    return everywhere


def check_all_compared(found: Sequence[Routing], config: ResolvedConfig, num_microbatches: int) -> None:
    """Raise RuntimeError unless the choice of every token in every layer was compared, on one rank each."""
    tokens = num_microbatches * config.training.micro_batch_size * config.model.seq_length
    wanted, compared = len(expert_layers(config.model)) * tokens, sum(routing.num_choices for routing in found)
    if compared != wanted:
        raise RuntimeError(
            f"the experts of {compared:,} tokens were compared, not of all {wanted:,}: the comparison proves nothing "
            "about the others"
        )


# ------------------------------------------------------------------------------------------------------------- tensors

# gradients this much smaller than the model's largest are mathematically zero: in fp64 only rounding is left
ZERO_SHARE = 1e-12
LEAST_PATTERN = 4  # elements: fewer are a multiple of anything


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that rounding explains.

    A tensor passes if max|grid - plain| <= tolerance * max|plain|. least_share: a gradient tensor whose largest element
    is below this share of the model's largest gradient is held to that share instead of to its own largest element.
    Gradients that are mathematically zero (a key norm's bias without rotary positions, for example) are held to the
    model's largest gradient: they are pure rounding.
    """

    gradient: float
    weight: float
    loss: float
    grad_norm: float
    least_share: float = 0.0


FP64 = Tolerance(gradient=1e-10, weight=1e-10, loss=1e-10, grad_norm=1e-10)

# Tolerances of the other dtypes (gradient, weight, loss, grad_norm) in units of epsilon x sqrt(layers), since the
# roundings of a residual stream add up like a random walk. They are about four times the largest differences seen over
# grids, shapes and depths. fp32 needs more units because its sums are fp32 too; with half types sums, norms and softmax
# are in fp32, and one rounding of an activation outweighs them all.
NATIVE = {"fp32": (64, 16, 8, 16), "bf16": (8, 3, 1, 4), "fp16": (8, 3, 1, 4)}
# gradients that cancel (keys see only differences of scores) are small compared with the terms of their sums
LEAST_SHARE = 0.1


def tolerance_of(config: Config) -> Tolerance:
    """Return the tolerance for the configuration's dtype.

    Gradients reduced in bf16 are rounded like bf16; updates with narrower state stay within that, as the learning rate
    is small.
    """
    dtype = config.precision.dtype
    if dtype == "fp64":
        return FP64
    if config.parallel.grad_reduce_in_bf16 or state_dtypes(config.optimizer, config.precision).is_narrow:
        dtype = "bf16"
    unit = torch.finfo(parameter_dtype(dtype)).eps * math.sqrt(config.model.num_layers)
    gradient, weight, loss, grad_norm = (factor * unit for factor in NATIVE[dtype])
    return Tolerance(gradient, weight, loss, grad_norm, LEAST_SHARE)


@dataclass(frozen=True)
class HeldPiece:
    """A piece of a global tensor that this rank holds. values: [piece.box.num_elements], row-major in the box."""

    stage: int
    piece: Piece
    values: Tensor


@dataclass(frozen=True)
class Difference:
    """One tensor on one rank: its largest error and where it is."""

    name: str
    place: int  # index of the tensor in model order
    stage: int
    difference: float  # max|grid - plain| over the elements that the rank holds
    bound: float  # the largest difference allowed
    scale: float  # max|plain| of the whole tensor, or the minimum that it is held to; bound = tolerance * scale
    index: tuple[int, ...]  # of the worst element in the global tensor
    grid: float  # its value on the grid
    plain: float  # and in the oracle
    box: Box  # the piece that holds it
    part: str  # its row of a fused tensor, such as 'key head 1'
    rows: tuple[int, int] | None  # first and last global row with an element out of bounds; None if all pass
    num_wrong: int
    num_held: int
    factor: float | None  # grid = factor * plain throughout; None if the values are not in proportion

    @property
    def passes(self) -> bool:
        return self.difference <= self.bound

    @property
    def ratio(self) -> float:
        """The difference relative to the scale."""
        if self.scale:
            return self.difference / self.scale
        return 0.0 if self.difference == 0.0 else math.inf


def gradient_pieces(runtime: TrainingRuntime) -> Iterator[HeldPiece]:
    """Yield this rank's reduced gradients as views: its shards with the distributed optimizer, else whole ones."""
    for stage, buffers in runtime.buffers.items():
        for store in buffers.trained:
            for bucket in store.layout.buckets:
                (low, high), gradients = store.shard_range(bucket), store.own_gradients(bucket)
                for position, piece in store.pieces(bucket, low, high):
                    yield HeldPiece(stage, piece, gradients[position - low :][: piece.box.num_elements])


def weight_pieces(runtime: TrainingRuntime) -> Iterator[HeldPiece]:
    """Yield this rank's whole local parameters and states, as the next forward reads them."""
    runtime.stores.finish_weights()
    states = {spec.name: spec for spec in model_states(runtime.plan.config.model)}
    for stage, module in runtime.stages.items():
        for name, values in module.named_buffers():
            (piece,) = pieces(states[name], 0, 1)
            yield HeldPiece(stage, piece, values)
    for stage, buffers in runtime.buffers.items():
        specs = {spec.name: spec for spec in runtime.plan.stage_specs[stage]}
        with runtime.stores.whole([stage]):
            whole = {name: buffers.parameter(name).detach().view(-1).clone() for name in buffers.names}
        for name, local in whole.items():
            for piece in pieces(specs[name], *runtime.groups.cut_of(specs[name].is_expert)):
                yield HeldPiece(stage, piece, local[piece.start : piece.stop])


def uncovered(specs: Iterable[ParamSpec], held: Iterable[tuple[str, Box]]) -> list[str]:
    """Return the names of the tensors with an element in none of the boxes. held: tensor names with boxes."""
    missing = {spec.name: torch.ones(spec.shape, dtype=torch.bool) for spec in specs}
    for name, box in held:
        missing[name][box.slices] = False
    return [name for name, elements in missing.items() if elements.any()]


def compare(
    held: Iterable[HeldPiece], expected: Mapping[str, Tensor], tolerance: float, least_share: float = 0.0
) -> list[Difference]:
    """Return the difference of each tensor of which this rank holds something, in model order.

    expected: whole fp64 tensors by name, in model order. tolerance: relative to the tensor's largest element.
    least_share: see `Tolerance`.
    """
    sizes = {name: tensor.abs().max().item() for name, tensor in expected.items()}
    largest = max(sizes.values())
    places = {name: place for place, name in enumerate(expected)}
    by_tensor: dict[tuple[int, str], list[HeldPiece]] = {}
    for piece in held:
        by_tensor.setdefault((piece.stage, piece.piece.spec.name), []).append(piece)
    found = []
    for (_, name), its_pieces in by_tensor.items():
        scale = max(sizes[name], least_share * largest) if sizes[name] > ZERO_SHARE * largest else largest
        found.append(_difference(places[name], its_pieces, expected[name], scale, tolerance * scale))
    return sorted(found, key=lambda difference: (difference.place, difference.stage))


def _difference(place: int, held: list[HeldPiece], expected: Tensor, scale: float, bound: float) -> Difference:
    grid = torch.cat([piece.values for piece in held]).to(expected.dtype)
    plain = torch.cat([expected[piece.piece.box.slices].reshape(-1) for piece in held])
    errors = torch.nan_to_num((grid - plain).abs(), nan=torch.inf)
    worst, wrong = int(errors.argmax()), errors > bound
    spec, boxes = held[0].piece.spec, [piece.piece.box for piece in held]
    ranges = [[torch.arange(part.start, part.stop) for part in box.slices] for box in boxes]
    # the global index of each element, [n, dims]
    indices = torch.cat([torch.cartesian_prod(*each).view(-1, len(spec.shape)) for each in ranges])
    index, wrong_rows = tuple(indices[worst].tolist()), indices[wrong.cpu(), 0].tolist()
    element = Box(index, (1,) * len(index))
    return Difference(
        name=spec.name,
        place=place,
        stage=held[0].stage,
        difference=errors[worst].item(),
        bound=bound,
        scale=scale,
        index=index,
        grid=grid[worst].item(),
        plain=plain[worst].item(),
        box=next(box for box in boxes if box.intersect(element)),
        part=part_of(spec, index),
        rows=(min(wrong_rows), max(wrong_rows)) if wrong_rows else None,
        num_wrong=int(wrong.sum()),
        num_held=errors.numel(),
        factor=_factor(grid, plain) if wrong_rows else None,
    )


def _factor(grid: Tensor, plain: Tensor) -> float | None:
    """Return c if grid = c * plain explains 95 % of the error (a sum made twice, a wrong divisor), otherwise None."""
    squares = plain.square().sum().item()
    if squares == 0.0 or plain.numel() < LEAST_PATTERN:
        return None
    factor = (grid * plain).sum().item() / squares
    unexplained, error = (grid - factor * plain).abs().max().item(), (grid - plain).abs().max().item()
    return factor if unexplained <= 0.05 * error else None  # the comparison is False for NaN


def part_of(spec: ParamSpec, index: tuple[int, ...]) -> str:
    """Return the part of a fused tensor that a row belongs to, such as 'key head 1' or 'gate'; '' without parts."""
    row, slicing = index[0], spec.slicing
    if isinstance(slicing, QueryGroups):
        kinds = [(kind, head, n) for kind, n in slicing.heads_of_group.items() for head in range(n)]
        group, inside = divmod(row, len(kinds) * slicing.head_dim)
        kind, head, count = kinds[inside // slicing.head_dim]
        return f"{kind} head {group * count + head}"
    if isinstance(slicing, Fused) and slicing.parts == 2:
        return "gate" if row < spec.shape[0] // 2 else "up"
    return ""


@dataclass(frozen=True)
class Summary:
    """The differences of one rank's gradients or weights in one step; small enough to be sent to all ranks."""

    worst: Difference | None  # the largest relative to its bound; None if this rank's shards are all padding
    first: Difference | None  # the first in model order that is out of bounds
    wrong: tuple[str, ...]  # names of all tensors that are out of bounds

    @classmethod
    def of(cls, differences: Sequence[Difference]) -> Summary:
        """Summarize differences, which are in model order."""
        wrong = [difference for difference in differences if not difference.passes]
        names = tuple(difference.name for difference in wrong)
        return cls(worst(differences), wrong[0] if wrong else None, names)


@dataclass(frozen=True)
class RankStep:
    """The result of one rank in one step."""

    global_rank: int
    loss: float
    grad_norm: float
    gradients: Summary
    weights: Summary
    routing: Routing = NO_CHOICES
    ahead: tuple[float, ...] = ()  # losses of the modules of multi-token prediction


@dataclass(frozen=True)
class ParityStep:
    """One step on all ranks, in order of global ranks."""

    step: int
    loss: float  # the oracle's
    grad_norm: float  # the oracle's
    ranks: tuple[RankStep, ...]
    tolerance: Tolerance
    num_repeats: int = 0  # attempts that overflowed while a dynamic loss scale fell
    ahead: tuple[float, ...] = ()  # the oracle's losses of multi-token prediction

    @property
    def loss_passes(self) -> bool:
        return all(_is_close(rank.loss, self.loss, self.tolerance.loss) for rank in self.ranks)

    @property
    def ahead_passes(self) -> bool:
        """True if the losses of multi-token prediction are the oracle's on every rank."""
        return all(
            _is_close(loss, plain, self.tolerance.loss)
            for rank in self.ranks
            for loss, plain in zip(rank.ahead, self.ahead, strict=True)
        )

    @property
    def passes(self) -> bool:
        tensors = all(not rank.gradients.wrong and not rank.weights.wrong for rank in self.ranks)
        norms = all(_is_close(rank.grad_norm, self.grad_norm, self.tolerance.grad_norm) for rank in self.ranks)
        return tensors and norms and self.loss_passes and self.ahead_passes and self.first_other_choice() is None

    def first_other_choice(self) -> OtherChoice | None:
        """Return the first token that chose other experts on the grid, by layer; None if all chose the same."""
        found = (rank.routing.first for rank in self.ranks)
        return min((choice for choice in found if choice is not None), key=lambda each: each.layer, default=None)

    def first_wrong(self) -> tuple[str, list[tuple[RankStep, Difference]]]:
        """Return the first tensor out of bounds, gradients before weights and in model order.

        ('gradient' or 'weight', the ranks where it is wrong with their differences); ('', []) if all tensors pass.
        """
        for kind in ("gradient", "weight"):
            summaries = [(rank, rank.gradients if kind == "gradient" else rank.weights) for rank in self.ranks]
            found = [(rank, summary.first) for rank, summary in summaries if summary.first is not None]
            if found:
                place = min(first.place for _, first in found)
                return kind, [(rank, first) for rank, first in found if first.place == place]
        return "", []


def worst(differences: Iterable[Difference]) -> Difference | None:
    """Return the difference that is the largest relative to its bound."""
    return max(differences, key=lambda d: d.difference / d.bound if d.bound else d.difference, default=None)


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * abs(b)  # False for NaN

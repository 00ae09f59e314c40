"""Each rank's pieces of the model's tensors against the whole tensors of the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.sharding.boxes import Box, Piece, pieces
from megapipe.sharding.buffers import shard_pieces
from megapipe.sharding.slicing import Fused, QueryGroups
from megapipe.sharding.spec import ParamSpec

ZERO_SHARE = 1e-12  # a gradient this much smaller than the model's largest is mathematically zero: in fp64 what is left is rounding
LEAST_PATTERN = 4  # elements: fewer are a multiple of anything

Boxes = Mapping[str, Sequence[Box]]  # elements of tensors by their names


@dataclass(frozen=True)
class HeldPiece:
    """Elements of a global tensor that this rank holds. values: [piece.box.num_elements], row-major in the box."""

    stage: int
    piece: Piece
    values: Tensor


@dataclass(frozen=True)
class Difference:
    """One tensor on one rank: how far its worst element is off.

    place: of the tensor in model order. difference: max|grid - plain| over what the rank holds. bound: the most it may be, relative to
    scale: max|plain| of the whole tensor, or the least that counts. index: of the worst element in the global tensor; grid and plain are
    its values, box is the piece it lies in, part says what its row is (a key of group 1). rows: first and last global row with an element
    out of bounds, None if there is none; num_wrong of num_held elements are. factor: grid is this multiple of plain throughout, None if it
    is not.
    """

    name: str
    place: int
    stage: int
    difference: float
    bound: float
    scale: float
    index: tuple[int, ...]
    grid: float
    plain: float
    box: Box
    part: str
    rows: tuple[int, int] | None
    num_wrong: int
    num_held: int
    factor: float | None

    @property
    def passes(self) -> bool:
        return self.difference <= self.bound

    @property
    def ratio(self) -> float:
        """difference / scale."""
        return self.difference / self.scale if self.scale else (0.0 if self.difference == 0.0 else float("inf"))


def gradient_pieces(runtime: TrainingRuntime) -> Iterator[HeldPiece]:
    """The reduced gradients that this rank has: with the distributed optimizer its shards, else all of its stages. Views of the buffers."""
    replica, tp = runtime.groups.replicas.rank, runtime.groups.tp
    for stage, buffers in runtime.buffers.items():
        for buffer in buffers.buffers:
            for bucket in buffer.layout.buckets:
                low, high = buffer.shard_range(bucket, replica)
                for position, piece in shard_pieces(bucket, tp.rank, tp.size, low, high):
                    yield HeldPiece(stage, piece, buffer.gradients[position : position + piece.box.num_elements])


def weight_pieces(runtime: TrainingRuntime) -> Iterator[HeldPiece]:
    """This rank's parameters, whole local tensors, as the next forward reads them."""
    runtime.gather.finish()
    tp = runtime.groups.tp
    for stage, buffers in runtime.buffers.items():
        specs = {spec.name: spec for spec in runtime.plan.stage_specs[stage]}
        for name in buffers.names:
            local = buffers.parameter(name).detach().view(-1)
            for piece in pieces(specs[name], tp.rank, tp.size):
                yield HeldPiece(stage, piece, local[piece.start : piece.stop])


def boxes_of(held: Iterable[HeldPiece]) -> Boxes:
    """Which elements these are."""
    found: dict[str, list[Box]] = {}
    for piece in held:
        found.setdefault(piece.piece.spec.name, []).append(piece.piece.box)
    return found


def uncovered(specs: Iterable[ParamSpec], ranks: Sequence[Boxes]) -> list[str]:
    """Names of the tensors of which some element lies in no rank's boxes."""
    names = []
    for spec in specs:
        covered = torch.zeros(spec.shape, dtype=torch.bool)
        for boxes in ranks:
            for box in boxes.get(spec.name, ()):
                covered[box.slices] = True
        if not covered.all():
            names.append(spec.name)
    return names


def compare(
    held: Iterable[HeldPiece], expected: Mapping[str, Tensor], tolerance: float, least_share: float = 0.0
) -> list[Difference]:
    """The differences of all tensors of which this rank holds something, in model order.

    expected: whole tensors by name, fp64, in model order. tolerance: relative to max|plain| of the tensor, and at least to least_share of
    the largest tensor's; where plain is mathematically zero, to the largest tensor's.
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
    worst = int(errors.argmax())
    box, index = _place(held, worst)
    wrong = (errors > bound).nonzero().view(-1).tolist()
    rows = [_place(held, position)[1][0] for position in _ends_of_boxes(held, wrong)]
    spec = held[0].piece.spec
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
        box=box,
        part=part_of(spec, index),
        rows=(min(rows), max(rows)) if rows else None,
        num_wrong=len(wrong),
        num_held=errors.numel(),
        factor=_factor(grid, plain) if wrong else None,
    )


def _place(held: list[HeldPiece], position: int) -> tuple[Box, tuple[int, ...]]:
    """The box and the global index of an element of the concatenated pieces."""
    for piece in held:
        box = piece.piece.box
        if position < box.num_elements:
            columns = box.shape[1] if len(box.shape) == 2 else 1
            inside = divmod(position, columns)[: len(box.shape)]
            return box, tuple(offset + i for offset, i in zip(box.offset, inside, strict=True))
        position -= box.num_elements
    raise IndexError(f"element {position} lies behind the last piece")


def _ends_of_boxes(held: list[HeldPiece], positions: list[int]) -> list[int]:
    """The first and the last of ascending positions in each piece: all that the range of rows needs."""
    found, end, at = [], 0, 0
    for piece in held:
        start, end = end, end + piece.piece.box.num_elements
        inside = []
        while at < len(positions) and start <= positions[at] < end:
            inside.append(positions[at])
            at += 1
        found += inside[:1] + inside[-1:]
    return found


def _factor(grid: Tensor, plain: Tensor) -> float | None:
    """c if grid is c plain but for a twentieth of what it is off by: a sum that was made too often, or a wrong divisor."""
    squares = plain.square().sum().item()
    if squares == 0.0 or plain.numel() < LEAST_PATTERN:
        return None
    factor = (grid * plain).sum().item() / squares
    unexplained, error = (grid - factor * plain).abs().max().item(), (grid - plain).abs().max().item()
    return factor if unexplained <= 0.05 * error else None  # False for NaN


def part_of(spec: ParamSpec, index: tuple[int, ...]) -> str:
    """What a row of a fused tensor is; '' for a tensor of one part."""
    row, slicing = index[0], spec.slicing
    if isinstance(slicing, QueryGroups):
        queries = slicing.heads // slicing.groups
        group, inside = divmod(row, (queries + 2) * slicing.head_dim)
        head = inside // slicing.head_dim
        return (
            f"query head {group * queries + head}"
            if head < queries
            else f"{('key', 'value')[head - queries]} head {group}"
        )
    if isinstance(slicing, Fused) and slicing.parts == 2:
        return "gate" if row < spec.shape[0] // 2 else "up"
    return ""

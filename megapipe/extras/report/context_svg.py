"""Context parallelism as SVG: which cp rank holds which tokens, which heads it has during attention, and which blocks
of queries and keys it computes, with the step of the ring in which the keys arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from megapipe.errors import ConfigError
from megapipe.extras.report.grid_svg import COLOURS, EMPTY, QUIET, TEXT
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.sequence import SequencePart

MOST_RANKS = 8  # of cp, each with its colour
CELL, SIDE, GAP, LEFT, TOP = 30, 240, 70, 96, 84  # px: a chunk, the least side; gap, and margins before and above


def context_svg(plan: RunPlan) -> str:
    """Return the drawing for the first layer with attention. Raises ConfigError without 2 to 8 cp ranks."""
    cp, attention = plan.topology.cp, next((each.attention for each in plan.model.layers if each.attention), None)
    if attention is None or not 1 < cp <= MOST_RANKS:
        raise ConfigError(f"a drawing of context parallelism needs --context-parallel-size 2 to {MOST_RANKS}, not {cp}")
    kind = attention.cp_comm_type
    inner = {"a2a": cp, "a2a+p2p": plan.topology.cp_inner}.get(kind, 1)
    side, seq = _side(cp), plan.config.model.seq_length
    width, height = LEFT + 2 * side + GAP + 24, TOP + side + 62
    right = LEFT + side + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            _text(12, 22, f"cp {cp}, {kind}: {seq:,} tokens in {2 * cp} chunks", TEXT, size=14),
            _text(LEFT, 46, "tokens of a rank, heads during attention", QUIET),
            _text(right, 46, "blocks of a head: queries down, keys across", QUIET),
            *_tokens(cp),
            *_heads(cp, inner),
            *_blocks(plan, inner, attention.window(plan.shape), kind == "all_gather", right),
            *_legend(cp, kind, height - 18),
            "</svg>\n",
        ]
    )


def _side(cp: int) -> float:
    return max(SIDE, 2 * cp * CELL)


def _tokens(cp: int) -> Iterator[str]:
    """Yield the owners of the chunks outside attention."""
    yield _text(LEFT - 8, TOP - 10, "tokens", TEXT, "end")
    width = _side(cp) / (2 * cp)
    for chunk, rank in enumerate(_owners(cp)):
        yield from _cell(LEFT + chunk * width, TOP - 26, width, 24, rank, str(rank))


def _heads(cp: int, inner: int) -> Iterator[str]:
    """Yield the owners of heads and positions during attention: inner bands of heads, cp / inner parts of sequences."""
    owners, height = _owners(cp // inner), _side(cp) / inner
    width = _side(cp) / len(owners)
    for band in range(inner):
        label = f"heads {band + 1}/{inner}" if inner > 1 else "all heads"
        yield _text(LEFT - 8, TOP + 6 + (band + 0.5) * height + 4, label, TEXT, "end")
        for chunk, part in enumerate(owners):
            rank = part * inner + band
            yield from _cell(LEFT + chunk * width, TOP + 6 + band * height, width, height, rank, str(rank))


def _blocks(plan: RunPlan, inner: int, window: int | None, gathers: bool, x: float) -> Iterator[str]:
    """Yield the matrix of chunks of queries and keys of the ring to which rank 0 belongs."""
    ring = plan.topology.cp // inner
    owners = _owners(ring)
    size, chunk = _side(plan.topology.cp) / len(owners), plan.config.model.seq_length // len(owners)
    for row, queries in enumerate(owners):
        top = TOP + 6 + row * size
        for column, keys in enumerate(owners):
            left, step = x + column * size, (queries - keys) % ring
            nearest = (row - column) * chunk - (chunk - 1)  # from a query of the row to a key of the column
            if column > row or (window is not None and nearest >= window):
                yield from _cell(left, top, size, size, None, "")
            else:
                label = str(step) if step == 0 or not gathers else "g"
                yield from _cell(left, top, size, size, queries * inner, label, is_diagonal=row == column)


def _legend(cp: int, kind: str, y: float) -> Iterator[str]:
    numbers = {
        "p2p": "numbers: the step of the ring in which a rank has the keys",
        "all_gather": "0: own keys; g: after the gather",
        "a2a": "0: all keys are there after the exchange",
        "a2a+p2p": "numbers: the step of the ring in which a rank has the keys",
    }
    for rank in range(cp):
        yield f'<rect x="{LEFT + 66 * rank}" y="{y - 10}" width="12" height="12" fill="{COLOURS[rank]}"/>'
        yield _text(LEFT + 66 * rank + 17, y, f"rank {rank}", TEXT)
    yield _text(LEFT, y - 20, numbers[kind], QUIET)


def _owners(ranks: int) -> Sequence[int]:
    """Return the rank that holds each of 2 x ranks chunks; of one rank the whole sequence is one chunk."""
    if ranks == 1:
        return [0]
    owner = {chunk: rank for rank in range(ranks) for chunk in SequencePart(rank, ranks).chunks}
    return [owner[chunk] for chunk in range(2 * ranks)]


def _cell(
    x: float, y: float, width: float, height: float, rank: int | None, label: str, is_diagonal: bool = False
) -> Iterator[str]:
    """Yield a rectangle in the colour of a rank, on the diagonal its lower half."""
    right, bottom = x + width - 1, y + height - 1
    colour = EMPTY if rank is None or is_diagonal else COLOURS[rank]
    yield f'<rect x="{x:g}" y="{y:g}" width="{width - 1:g}" height="{height - 1:g}" fill="{colour}"/>'
    if is_diagonal and rank is not None:
        yield f'<path d="M{x:g} {y:g}L{right:g} {bottom:g}L{x:g} {bottom:g}Z" fill="{COLOURS[rank]}"/>'
    place = (x + width / 3, y + height * 3 / 4) if is_diagonal else (x + width / 2, y + height / 2)
    if label:
        yield _text(place[0], place[1] + 4, label, "#ffffff", "middle")


def _text(x: float, y: float, words: str, colour: str, anchor: str = "start", size: int = 11) -> str:
    weight = ' font-weight="bold"' if size > 11 else ""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place}{weight} fill="{colour}">{escape(words)}</text>'

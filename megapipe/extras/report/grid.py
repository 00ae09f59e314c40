"""Pictures of a plan: the grid of its ranks, context parallelism, and its schedule.

The grid: every rank on its node shows the whole model, one row for the embedding, each layer and the head, cut into tp
columns. What the rank holds is filled, in the colour of its dp_rank, since ranks of one colour train on the same
sequences. Experts have the right half of their layers' rows, cut into ep x etp columns.

Context parallelism: which cp rank holds which tokens, which heads it has during attention, and which blocks of queries
and keys it computes, with the step of the ring in which the keys arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megapipe.errors import ConfigError
from megapipe.extras.report.drawing import element, entry, legend, paper, rect, squares, text
from megapipe.extras.report.timeline import svg
from megapipe.formatting import grid_text, range_text
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.simulate import simulate
from megapipe.sharding.sequence import SequencePart

COLOURS = ("#4c86c6", "#e0a33f", "#4fa37a", "#8f6bb3", "#b9534c", "#5aa3a6", "#8a8d3c", "#c77ba4")  # of ranks, again
EMPTY, NODE, EDGE, TEXT, QUIET = "#eceef2", "#f7f8fa", "#d4d8e0", "#1d2330", "#5b6270"
MOST_RANKS, MOST_PER_LINE = 128, 8
WIDTH, MARGIN, HEADING, GAP = 108, 12, 34, 10  # px: of a rank's box, around it, above the model, between boxes
NAMES, NAME_HEIGHT = 66, 12  # px: names of rows, before the boxes
SMALL = {"font_size": "9.5", "fill": QUIET}  # of text in a box and beside it
SCHEDULE_WIDTH = 1200  # px
MOST_CP_RANKS = 8  # each with its colour
CELL, SIDE, LEFT, TOP = 30, 240, 96, 84  # px: a chunk, the least side; margins before and above
RING = "numbers: the step of the ring in which a rank has the keys"
NUMBERS = {  # --cp-comm-type -> what is written in a block
    "p2p": RING,
    "all_gather": "0: own keys; g: after the gather",
    "a2a": "0: all keys are there after the exchange",
    "a2a+p2p": RING,
}


def grid_svg(plan: RunPlan) -> str:
    """Return the drawing of the grid. Raises ConfigError for more than 128 ranks."""
    topology = plan.topology
    if topology.world_size > MOST_RANKS:
        way = f"plan for at most {MOST_RANKS} ranks with the same tensor and pipeline parallel sizes"
        raise ConfigError(f"a grid of {topology.world_size} ranks is too large for a drawing; {way}")
    per_node = topology.ranks_per_node or topology.world_size
    columns = min(per_node, MOST_PER_LINE)
    rows = [  # the stage of the embedding, of each layer, and of the head
        stage
        for stage, layers in enumerate(plan.partition.stages)
        for _ in range(layers.has_embedding + layers.num_layers + layers.has_head)
    ]
    row = max(2, min(14, 160 // len(rows)))
    box = HEADING + row * len(rows) + (20 if plan.model.has_experts else 8)
    node_height = 26 + -(-per_node // columns) * (box + GAP)
    width = max(2 * MARGIN + NAMES + columns * (WIDTH + GAP) + GAP, 560)
    height = 52 + topology.num_nodes * (node_height + GAP) + 26
    halves = "left half: tp, right half: experts" if plan.model.has_experts else "columns: tp"
    parts = [
        text(MARGIN, 20, _title(plan), font_size=14, font_weight="bold", fill=TEXT),
        text(MARGIN, 37, f"{halves}; filled: held by the rank; colour: its dp_rank", fill=QUIET),
    ]
    for node in range(topology.num_nodes):
        top = 48 + node * (node_height + GAP)
        frame = rect(MARGIN, top, width - 2 * MARGIN, node_height, rx=6, fill=NODE, stroke=EDGE)
        parts.append(frame + text(MARGIN + 10, top + 17, f"node {node}", fill=QUIET))
        for place in range(per_node):
            line, column = divmod(place, columns)
            x, y = MARGIN + NAMES + GAP + column * (WIDTH + GAP), top + 26 + line * (box + GAP)
            parts += _names(x - 7, y, len(rows), row) if column == 0 else ()
            parts.append(rect(x, y, WIDTH, box, rx=4, fill="#ffffff", stroke=EDGE))
            parts += _rank(plan, node * per_node + place, x, y, rows, row)
    entries = (
        entry(f"dp_rank {rank}", *squares(colour), fill=TEXT)
        for rank, colour in zip(range(topology.dp), COLOURS, strict=False)
    )
    shown, last = legend(entries, MARGIN, width, height - 14)
    return paper(width, last + 14, [*parts, *shown])


def _names(x: int, y: int, num_rows: int, row: int) -> Iterator[str]:
    """Yield the names of the rows, or of as many of them as there is room for."""
    last, step = num_rows - 1, -(-NAME_HEIGHT // row)
    for index in (*range(0, last - step + 1, step), last):
        name = "embedding" if index == 0 else "head" if index == last else f"layer {index - 1}"
        yield text(x, f"{y + HEADING + (index + 0.5) * row + 3:g}", name, text_anchor="end", **SMALL)


def _rank(plan: RunPlan, rank: int, x: int, y: int, rows: Sequence[int], row: int) -> Iterator[str]:
    """Yield the names of a rank, and the model as it holds it. row: the height of each of the rows."""
    topology = plan.topology
    place = topology.coordinates(rank)
    shared = f"cp {place.cp_rank}, " if topology.cp > 1 else ""
    coordinates = f"tp {place.tp_rank}, {shared}pp {place.pp_rank}, dp {place.dp_rank}"
    yield text(x + 6, y + 14, f"rank {rank}", font_weight="bold", fill=TEXT)
    yield text(x + 6, y + 27, coordinates, **SMALL)
    if plan.model.has_experts:
        ep_rank, etp_rank = divmod(topology.expert_rank(rank), topology.etp)
        shown = f"ep {ep_rank}" + (f", etp {etp_rank}" if topology.etp > 1 else "")
        yield text(x + WIDTH - 6, y + 14, shown, text_anchor="end", **SMALL)
        held = next(kind.num_experts for kind in plan.model.kinds if kind.num_experts) // topology.ep
        names = f"experts {range_text(range(ep_rank * held, (ep_rank + 1) * held))}"
        yield text(x + WIDTH - 6, y + HEADING + row * len(rows) + 13, names, text_anchor="end", **SMALL)
    stages = plan.placement.stages_of(place.pp_rank)
    half = (WIDTH - 12) // 2 if plan.model.has_experts else WIDTH - 12
    experts = [0, *(layer.num_experts for layer in plan.model.layers), 0]  # of each row
    for index, (stage, of_row) in enumerate(zip(rows, experts, strict=True)):
        cuts = [(x + 6, half, topology.tp, place.tp_rank)]
        if of_row:
            cuts.append((x + 8 + half, half - 2, topology.ep * topology.etp, topology.expert_rank(rank)))
        for left, width, count, own in cuts:
            for part in range(count):
                colour = COLOURS[place.dp_rank % len(COLOURS)] if stage in stages and part == own else EMPTY
                at, size = f"{left + part * width / count:.1f}", f"{width / count - min(1, width / count / 4):.1f}"
                yield rect(at, y + HEADING + index * row, size, row - 1, fill=colour)


def _title(plan: RunPlan) -> str:
    t = plan.topology
    experts = f", experts: {t.experts_text}" if plan.model.has_experts else ""
    return f"{t.world_size} ranks = {grid_text(t.tp, t.pp, t.dp, t.cp, plan.num_chunks)}{experts}"


def schedule_svg(plan: RunPlan) -> str:
    """Return the step of a full batch, to the scale of its stages' FLOPs: a forward of the cheapest stage takes 1 s."""
    costs = plan.stage_costs
    unit = min(seconds for (_, op), seconds in costs.seconds.items() if op is Op.F)
    scaled = replace(costs, seconds={key: seconds / unit for key, seconds in costs.seconds.items()})
    return svg(simulate(plan.schedule(plan.batch.full // plan.batch.samples_per_microbatch), scaled), SCHEDULE_WIDTH)


def context_svg(plan: RunPlan) -> str:
    """Return the drawing for the first layer with attention. Raises ConfigError without 2 to 8 cp ranks."""
    cp, layer = plan.topology.cp, next((each for each in plan.model.layers if each.config.has_attention), None)
    if layer is None or not 1 < cp <= MOST_CP_RANKS:
        raise ConfigError(
            f"a drawing of context parallelism needs --context-parallel-size 2 to {MOST_CP_RANKS}, not {cp}"
        )
    kind = layer.comm_type
    inner = {"a2a": cp, "a2a+p2p": plan.topology.cp_inner}.get(kind, 1)
    side, seq = max(SIDE, 2 * cp * CELL), plan.config.model.seq_length
    right, bottom = LEFT + side + 70, TOP + side + 44
    title = f"cp {cp}, {kind}: {seq:,} tokens in {2 * cp} chunks"
    parts = [
        text(12, 22, title, text_anchor="start", font_size=14, font_weight="bold", fill=TEXT),
        _label(LEFT, 46, "tokens of a rank, heads during attention", QUIET),
        _label(right, 46, "blocks of a head: queries down, keys across", QUIET),
        _label(LEFT - 8, TOP - 10, "tokens", TEXT, "end"),
    ]
    width = side // (2 * cp)
    for chunk, rank in enumerate(_owners(cp)):  # outside attention
        parts += _cell(LEFT + chunk * width, TOP - 26, width, 24, rank, str(rank))
    parts += _heads(cp, inner, side)
    parts += _blocks(cp // inner, inner, side, seq, layer.visibility(plan.shape).window, kind == "all_gather")
    entries = (
        entry(f"rank {rank}", *squares(colour), fill=TEXT) for rank, colour in zip(range(cp), COLOURS, strict=False)
    )
    shown, last = legend(entries, LEFT, right + side, bottom)
    parts.append(_label(LEFT, bottom - 20, NUMBERS[kind], QUIET))
    return paper(right + side + 24, last + 18, [*parts, *shown])


def _heads(cp: int, inner: int, side: int) -> Iterator[str]:
    """Yield the owners of heads and positions during attention: inner bands of heads, cp / inner parts of sequences."""
    owners, height = _owners(cp // inner), side // inner
    width = side // len(owners)
    for band in range(inner):
        y = TOP + 6 + band * height
        label = f"heads {band + 1}/{inner}" if inner > 1 else "all heads"
        yield _label(LEFT - 8, y + height / 2 + 4, label, TEXT, "end")
        for chunk, part in enumerate(owners):
            rank = part * inner + band
            yield from _cell(LEFT + chunk * width, y, width, height, rank, str(rank))


def _blocks(ring: int, inner: int, side: int, seq: int, window: int | None, gathers: bool) -> Iterator[str]:
    """Yield the matrix of chunks of queries and keys of the ring to which rank 0 belongs."""
    owners = _owners(ring)
    size, chunk = side // len(owners), seq // len(owners)
    for row, queries in enumerate(owners):
        for column, keys in enumerate(owners):
            x, y, step = LEFT + side + 70 + column * size, TOP + 6 + row * size, (queries - keys) % ring
            nearest = (row - column) * chunk - (chunk - 1)  # from a query of the row to a key of the column
            if column > row or (window is not None and nearest >= window):
                yield from _cell(x, y, size, size, None, "")
            else:
                label = str(step) if step == 0 or not gathers else "g"
                yield from _cell(x, y, size, size, queries * inner, label, is_diagonal=row == column)


def _owners(ranks: int) -> Sequence[int]:
    """Return the rank that holds each of 2 x ranks chunks; of one rank the whole sequence is one chunk."""
    if ranks == 1:
        return [0]
    owner = {chunk: rank for rank in range(ranks) for chunk in SequencePart(rank, ranks).chunks}
    return [owner[chunk] for chunk in range(2 * ranks)]


def _cell(
    x: int, y: int, width: int, height: int, rank: int | None, label: str, is_diagonal: bool = False
) -> Iterator[str]:
    """Yield a rectangle in the colour of a rank, on the diagonal its lower half."""
    right, bottom = x + width - 1, y + height - 1
    colour = EMPTY if rank is None else COLOURS[rank]
    yield rect(x, y, width - 1, height - 1, fill=EMPTY if is_diagonal else colour)
    if is_diagonal:
        yield element("path", d=f"M{x} {y}L{right} {bottom}L{x} {bottom}Z", fill=colour)
    if label:
        across, down = (width / 3, height * 3 / 4) if is_diagonal else (width / 2, height / 2)
        yield _label(x + across, y + down + 4, label, "#ffffff", "middle")


def _label(x: float, y: float, words: str, colour: str, anchor: str = "start") -> str:
    return text(f"{x:g}", f"{y:g}", words, text_anchor=anchor, font_size=11, fill=colour)

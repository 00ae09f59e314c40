"""A plan's grid as SVG: every rank on its node, with the part of the model that it holds.

Each rank shows the whole model, one row for the embedding, each layer and the head, cut into tp columns. What the rank
holds is filled, in the colour of its dp_rank, since ranks of one colour train on the same sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megapipe.errors import ConfigError
from megapipe.plan.run_plan import RunPlan

COLOURS = ("#4c86c6", "#e0a33f", "#4fa37a", "#8f6bb3", "#b9534c", "#5aa3a6", "#8a8d3c", "#c77ba4")  # of dp_ranks, again
EMPTY, NODE, TEXT, QUIET = "#eceef2", "#f7f8fa", "#1d2330", "#5b6270"
MOST_RANKS, MOST_PER_LINE = 128, 8
WIDTH, MARGIN, HEADING, GAP = 108, 12, 34, 10  # px: of a rank's box, around it, above the model, between boxes


def grid_svg(plan: RunPlan) -> str:
    """Return the drawing. Raises ConfigError for more than 128 ranks."""
    topology = plan.topology
    if topology.world_size > MOST_RANKS:
        way = f"plan for at most {MOST_RANKS} ranks with the same tensor and pipeline parallel sizes"
        raise ConfigError(f"a grid of {topology.world_size} ranks is too large for a drawing; {way}")
    per_node = topology.ranks_per_node or topology.world_size
    columns = min(per_node, MOST_PER_LINE)
    lines = -(-per_node // columns)
    row = max(2, min(14, 160 // len(_rows(plan))))
    box = HEADING + row * len(_rows(plan)) + 8
    node_height = 26 + lines * (box + GAP)
    width = max(2 * MARGIN + columns * (WIDTH + GAP) + GAP, 560)
    height = 52 + topology.num_nodes * (node_height + GAP) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="20" font-size="14" font-weight="bold" fill="{TEXT}">{escape(_title(plan))}</text>',
        f'<text x="{MARGIN}" y="37" fill="{QUIET}">rows: embedding, {len(_rows(plan)) - 2} layers, head; columns: tp; '
        "filled: held by the rank; colour: its dp_rank</text>",
    ]
    for node in range(topology.num_nodes):
        top = 48 + node * (node_height + GAP)
        parts.append(
            f'<rect x="{MARGIN}" y="{top}" width="{width - 2 * MARGIN}" height="{node_height}" rx="6" fill="{NODE}" '
            f'stroke="#d4d8e0"/><text x="{MARGIN + 10}" y="{top + 17}" fill="{QUIET}">node {node}</text>'
        )
        for place in range(per_node):
            x = MARGIN + GAP + place % columns * (WIDTH + GAP)
            parts += _rank(plan, node * per_node + place, x, top + 26 + place // columns * (box + GAP), row, box)
    for dp_rank in range(min(topology.dp, len(COLOURS))):
        x = MARGIN + 84 * dp_rank
        parts.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{COLOURS[dp_rank]}"/>')
        parts.append(f'<text x="{x + 17}" y="{height - 14}" fill="{TEXT}">dp_rank {dp_rank}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _rank(plan: RunPlan, rank: int, x: int, y: int, row: int, box: int) -> Iterator[str]:
    """Yield the box of one rank."""
    place, tp = plan.topology.coordinates(rank), plan.topology.tp
    shared = f"cp {place.cp_rank}, " if plan.topology.cp > 1 else ""
    coordinates = f"tp {place.tp_rank}, {shared}pp {place.pp_rank}, dp {place.dp_rank}"
    yield f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{box}" rx="4" fill="#ffffff" stroke="#d4d8e0"/>'
    yield f'<text x="{x + 6}" y="{y + 14}" font-weight="bold" fill="{TEXT}">rank {rank}</text>'
    yield f'<text x="{x + 6}" y="{y + 27}" font-size="9.5" fill="{QUIET}">{coordinates}</text>'
    if plan.model.has_experts:
        ep_rank, etp_rank = divmod(plan.topology.expert_rank(rank), plan.topology.etp)
        shown = f"ep {ep_rank}" + (f", etp {etp_rank}" if plan.topology.etp > 1 else "")
        yield (
            f'<text x="{x + WIDTH - 6}" y="{y + 14}" font-size="9.5" text-anchor="end" fill="{QUIET}">{shown}</text>'
        )
    column = (WIDTH - 12) / tp
    stages = plan.placement.stages_of(place.pp_rank)
    for index, stage in enumerate(_rows(plan)):
        for slice_index in range(tp):
            held = stage in stages and slice_index == place.tp_rank
            colour = COLOURS[place.dp_rank % len(COLOURS)] if held else EMPTY
            yield (
                f'<rect x="{x + 6 + slice_index * column:.1f}" y="{y + HEADING + index * row}" '
                f'width="{column - 1:.1f}" height="{row - 1}" fill="{colour}"/>'
            )


def _rows(plan: RunPlan) -> list[int]:
    """Return the stage of the embedding, of each layer, and of the head."""
    rows = []
    for stage, layers in enumerate(plan.partition.stages):
        rows += [stage] * (layers.has_embedding + layers.num_layers + layers.has_head)
    return rows


def _title(plan: RunPlan) -> str:
    sizes = plan.topology
    chunks = f" x {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    shared = f" x cp {sizes.cp}" if sizes.cp > 1 else ""
    of_experts = f"etp {sizes.etp} x ep {sizes.ep} x {sizes.edp} copies x pp {sizes.pp}"
    experts = f", experts: {of_experts}" if plan.model.has_experts else ""
    return f"{sizes.world_size} ranks = tp {sizes.tp}{shared} x pp {sizes.pp}{chunks} x dp {sizes.dp}{experts}"

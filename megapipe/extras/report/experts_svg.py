"""Heat maps of the load of every expert, layer by layer, at some of the logged steps (--moe-per-layer-logging)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

MOST_MAPS, MOST_CELLS = 6, 30_000
WIDTH, ROW, LEFT, TOP = 860, 10, 64, 22  # px
LEVELS = 9  # colours from no load over the mean, in the middle, to twice the mean and more
LITTLE, MEAN, MUCH = (43, 108, 176), (245, 245, 245), (192, 57, 43)


def expert_maps_html(steps: Sequence[dict[str, Any]]) -> str:
    """Return the maps of a run's step records; '' if none has the load of its experts."""
    found = [record for record in steps if record.get("expert_load")]
    if not found:
        return ""
    cells = sum(map(len, found[-1]["expert_load"].values()))
    count = max(1, min(MOST_MAPS, MOST_CELLS // cells, len(found)))
    chosen = [found[round(index * (len(found) - 1) / max(count - 1, 1))] for index in range(count)]
    if count == 1:
        chosen = found[-1:]
    legend = " ".join(
        f'<i style="display:inline-block;width:14px;height:10px;border:0;background:{colour(level)}"></i>'
        for level in range(LEVELS)
    )
    note = f'<p class="soft">Tokens of each expert over the mean of its layer: 0 {legend} 2 and more.</p>'
    return note + "".join(map(_map, chosen))


def colour(level: int) -> str:
    """Return a colour of the scale, level 0 .. LEVELS - 1."""
    middle = (LEVELS - 1) / 2
    end, share = (LITTLE, 1 - level / middle) if level < middle else (MUCH, level / middle - 1)
    mixed = (round(mean + (other - mean) * share) for mean, other in zip(MEAN, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def level_of(load: float) -> int:
    """Return the colour's level of a load relative to the mean."""
    return min(LEVELS - 1, round(load * (LEVELS - 1) / 2))


def _map(record: dict[str, Any]) -> str:
    load: dict[str, list[float]] = record["expert_load"]
    height = TOP + ROW * len(load)
    columns = max(map(len, load.values()))
    width = (WIDTH - LEFT) / columns
    paths: dict[int, list[str]] = {}
    lines = []
    for row, (layer, loads) in enumerate(load.items()):
        y = TOP + row * ROW
        worst = max(range(len(loads)), key=loads.__getitem__)
        title = f"layer {layer}: expert {worst} has {loads[worst]:.2f} times the mean"
        lines.append(
            f'<text x="{LEFT - 6}" y="{y + ROW - 2}" text-anchor="end" class="tick">{escape(layer)}'
            f"<title>{escape(title)}</title></text>"
        )
        for expert, value in enumerate(loads):
            cell = f"M{LEFT + expert * width:.1f} {y}h{width:.1f}v{ROW}h-{width:.1f}z"
            paths.setdefault(level_of(value), []).append(cell)
    drawn = "".join(f'<path fill="{colour(level)}" d="{"".join(cells)}"/>' for level, cells in sorted(paths.items()))
    largest = max(max(loads) for loads in load.values())
    heading = f"step {record['step']:,}: layers x {columns} experts, at most {largest:.2f} times the mean"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
        f'<text x="{LEFT}" y="14" class="tick">{escape(heading)}</text>{"".join(lines)}{drawn}</svg>'
    )

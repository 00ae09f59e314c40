"""The report's section on the pipeline: plan and measurement, both bubbles, and the causes of the difference."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import accumulate
from pathlib import Path

from megapipe.extras.report.comparison_svg import NARROWEST, PHASES, comparison_svg, labels
from megapipe.extras.report.timeline import NAMES
from megapipe.formatting import milliseconds
from megapipe.profile.difference import PREDICTED, Idle
from megapipe.profile.profile import Profile, trace_path
from megapipe.profile.summary import PHASES_AFTER_ROW, Summary, clocks_text, oversubscription_text, summarize
from megapipe.schedule.action import Op

EXPLANATIONS = {  # cause -> text
    "equal stages": "the bubble of the schedule itself: every op takes its mean over all stages, messages take no time",
    "unequal stages": "an op takes longer on one stage than on another",
    "messages": "latency and bandwidth as measured between idle ranks",
    "noise": "imbalance between microbatches: the same op of the same stage takes longer for some than for others",
    "engine": "time between actions",
    "optimizer": "ranks that start late, launching reductions, waiting for parameters",
    "communication": "posting messages, and waiting for them longer than the other causes explain",
}
OPS = {**NAMES, Op.OVERLAP: "overlapped pair"}
MOST_STAGES = 24


def pipeline_html(profile: Profile, path: Path, num_profiles: int) -> str:
    """Return the section for one profile: figures, drawing, causes, times of the stages."""
    summary = summarize(profile)
    ranks = summary.pipeline.global_ranks
    drawn = comparison_svg(summary.typical, ranks, with_labels=False)
    is_wide = int(drawn.split('width="', 1)[1].split('"', 1)[0]) > NARROWEST
    parts = [
        _tiles(summary),
        _notes(profile, summary, path, num_profiles),
        f'<div class="timeline"><div class="ranks">{labels(ranks)}</div>'
        f'<div class="scroll" tabindex="0">{drawn}</div></div>',
        '<p class="soft">Scroll sideways to see the whole drawing.</p>' if is_wide else "",
        '<div class="two">',
        f"<div><h3>Causes of the difference</h3>{_causes(summary)}</div>",
        f"<div><h3>Time of each stage</h3>{_stages(summary)}</div>",
        "</div>",
    ]
    return "\n".join(filter(None, parts))


def tiles_html(tiles: Iterable[tuple[str, ...]]) -> str:
    """Return a row of figures. tiles: (name, value, meaning), or (name, value, meaning, planned value)."""
    drawn = ""
    for name, value, meaning, *planned in tiles:
        plan = "".join(f' <span class="plan">planned {each}</span>' for each in planned)
        drawn += f'<div class="tile"><b>{name}</b><span class="big">{value}</span>{plan}<small>{meaning}</small></div>'
    return f'<div class="tiles">{drawn}</div>'


def _tiles(summary: Summary) -> str:
    predicted, measured, work = summary.predicted_share, summary.measured_share, summary.work_seconds
    tiles: list[tuple[str, ...]] = [
        (
            "bubble, barrier",
            f"{measured.barrier:.1%}",
            "idle / (idle + work), from the first action of any rank to the last of any",
            f"{predicted.barrier:.1%}",
        ),
        (
            "bubble, chained",
            f"{measured.chained:.1%}",
            "of the rank with the most idle time, from its first to its last computation",
            f"{predicted.chained:.1%}",
        ),
        (
            "pipeline time of a step",
            milliseconds(summary.measured_idle.barrier + work),
            f"including {milliseconds(work)} of computation (mean over ranks)",
            milliseconds(summary.predicted_idle.barrier + work),
        ),
    ]
    phases = summary.phases
    if phases.get("step"):
        after = [f"{PHASES[name]} {milliseconds(phases[name])}" for name in PHASES_AFTER_ROW if name in phases]
        tiles.append(("whole step", milliseconds(phases["step"]), f"then {', '.join(after)}"))
    return tiles_html(tiles)


def _notes(profile: Profile, summary: Summary, path: Path, num_profiles: int) -> str:
    steps, shares = [step.step for step in summary.pipeline.steps], summary.all_shares
    measured = summary.typical.measured
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, means over {len(steps)}"
    sentences = [
        f"Profile of {span}: {escape(str(measured.schedule))}. The drawing shows step {measured.step.step}.",
        f"{clocks_text(profile).capitalize()}.",
    ]
    if note := oversubscription_text(profile):
        sentences.append(f"{note}.")
    if len(shares) > 1:
        sentences.append(
            f"This is the pipeline of tp {summary.pipeline.tp_rank}, dp {summary.pipeline.dp_rank}. The measured bubble"
            f" with a barrier is {min(shares):.1%} to {max(shares):.1%} over all {len(shares)} recorded pipelines."
        )
    if profile.links:
        size = f"{profile.message_bytes / 2**10:,.0f} KiB"
        link = max(profile.links, key=lambda each: each.latency_seconds + each.transfer_seconds)
        seconds = link.latency_seconds + link.transfer_seconds
        has_latency = link.transfer_seconds >= 1e-6
        latency = f", including {milliseconds(link.latency_seconds)} of latency" if has_latency else ""
        sentences.append(f"Between idle ranks a message of {size} takes {milliseconds(seconds)}{latency}.")
    more = f" (the newest of {num_profiles} profiles)" if num_profiles > 1 else ""
    data, trace = escape(path.name), escape(trace_path(path).name)
    sentences.append(f"Data: <code>{data}</code>{more}; trace for ui.perfetto.dev: <code>{trace}</code>.")
    return f'<p class="soft">{" ".join(sentences)}</p>'


def _causes(summary: Summary) -> str:
    """Return a waterfall chart: the bar of each cause begins where the previous one ends."""
    sums = [0.0, *accumulate(idle.barrier for idle in summary.causes.values())]
    low, high = min(sums), max(sums)
    scale = 100.0 / ((high - low) or 1.0)
    bars: list[tuple[str, str, float, Idle, str]] = []  # title, meaning, start, length, class
    for (name, idle), start in zip(summary.causes.items(), sums, strict=False):
        title = "optimizer and reduction" if name == "optimizer" else name
        bars.append((title, EXPLANATIONS[name], start, idle, "add" if idle.barrier >= 0 else "take"))
        if name == PREDICTED:
            meaning = "simulated with the mean times of each stage"
            bars.append(("predicted", meaning, 0.0, summary.predicted_idle, "sum"))
    bars.append(("measured", "", 0.0, summary.measured_idle, "sum"))
    rows = ""
    for title, meaning, start, idle, kind in bars:
        left, width = (start + min(idle.barrier, 0.0) - low) * scale, abs(idle.barrier) * scale
        bar = f'<div class="bar {kind}" style="left:{left:.2f}%;width:{max(width, 0.4):.2f}%"></div>'
        explained = f"<small>{meaning}</small>" if meaning else ""
        sign = "" if kind == "sum" else "+"
        numbers = "".join(f"<td class='n'>{value * 1e3:{sign},.2f}</td>" for value in idle)
        numbers = numbers.replace("-", "\N{MINUS SIGN}")
        rows += f'<tr class="{kind}"><td>{title}{explained}</td><td class="track">{bar}</td>{numbers}</tr>'
    head = "<tr><th>idle time per step</th><th></th><th>barrier</th><th>chained</th></tr>"
    foot = (
        '<p class="soft">In milliseconds. The causes are added to the simulated step one by one, so they add up '
        "exactly to the measured idle time. Barrier: mean over ranks; chained: the rank with the most idle time. "
        "Plan and measurement do the same work.</p>"
    )
    return f'<table class="causes">{head}{rows}</table>{foot}'


def _stages(summary: Summary) -> str:
    """Return a table of the mean and standard deviation of each op, one row per stage."""
    times = {(each.stage, each.op): each for each in summary.op_times}
    ops = [op for op in OPS if any(op is other for _, other in times)]
    stages = list(dict.fromkeys(stage for stage, _ in times))
    placement = summary.typical.measured.schedule.placement
    longest = max((each.mean_seconds for each in times.values()), default=0.0) or 1.0
    rows = "<tr><th>stage</th><th>rank</th>" + "".join(f"<th colspan='2'>{OPS[op]}</th>" for op in ops) + "</tr>"
    for stage in stages[:MOST_STAGES]:
        ranks = placement.ranks_of(int(stage)) if stage.isdigit() else ()
        rows += f"<tr><td>{stage}</td><td>{' '.join(str(summary.pipeline.global_ranks[rank]) for rank in ranks)}</td>"
        for op in ops:
            time = times.get((stage, op))
            if time is None:
                rows += "<td></td><td></td>"
                continue
            width = 100 * time.mean_seconds / longest
            numbers = f"{time.mean_seconds * 1e3:,.2f} \N{PLUS-MINUS SIGN} {time.deviation_seconds * 1e3:,.2f}"
            rows += f'<td class="track small"><div class="bar {op.value}" style="left:0;width:{width:.1f}%"></div></td>'
            rows += f'<td class="n">{numbers}</td>'
        rows += "</tr>"
    rest = f"<p class='soft'>and {len(stages) - MOST_STAGES} more stages</p>" if len(stages) > MOST_STAGES else ""
    foot = (
        '<p class="soft">In milliseconds: mean \N{PLUS-MINUS SIGN} standard deviation over microbatches and steps, '
        "without waits.</p>"
    )
    return f'<table class="ops">{rows}</table>{rest}{foot}'

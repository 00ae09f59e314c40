"""The report's section on the pipeline: plan and measurement, both bubbles, and the causes of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from megapipe.extras.report.comparison_svg import NAMES, NARROWEST, comparison_svg, labels
from megapipe.formatting import milliseconds
from megapipe.profile.difference import CAUSES, PREDICTED, Idle, OpTime
from megapipe.profile.profile import Profile, trace_path
from megapipe.profile.summary import PHASES_AFTER_ROW, Summary, clocks_text, oversubscription_text, summarize
from megapipe.schedule.action import Op

SHORT = {  # cause -> (title, explanation)
    "equal stages": (
        "equal stages",
        "the bubble of the schedule itself: every op takes its mean over all stages, messages take no time",
    ),
    "unequal stages": ("unequal stages", "an op takes longer on one stage than on another"),
    "messages": ("messages", "latency and bandwidth as measured between idle ranks"),
    "noise": (
        "noise",
        "imbalance between microbatches: the same op of the same stage takes longer for some than for others",
    ),
    "engine": ("engine", "time between actions"),
    "optimizer": ("optimizer and reduction", "ranks that start late, launching reductions, waiting for parameters"),
    "communication": ("communication", "posting messages, and waiting for them longer than the other causes explain"),
}
OPS = {**NAMES, Op.OVERLAP: "overlapped pair"}
MOST_STAGES = 24


def pipeline_html(profile: Profile, path: Path, num_profiles: int) -> str:
    """Return the section for one profile: figures, drawing, causes, times of the stages."""
    summary = summarize(profile)
    return "\n".join(
        [
            _tiles(summary),
            _notes(profile, summary, path, num_profiles),
            _drawing(summary),
            '<div class="two">',
            f"<div><h3>Causes of the difference</h3>{_causes(summary)}</div>",
            f"<div><h3>Time of each stage</h3>{_stages(summary)}</div>",
            "</div>",
        ]
    )


def _tiles(summary: Summary) -> str:
    predicted, measured = summary.predicted_share, summary.measured_share
    walls = [idle.barrier + summary.work_seconds for idle in (summary.predicted_idle, summary.measured_idle)]
    tiles = [
        _pair(
            "bubble, barrier",
            f"{predicted.barrier:.1%}",
            f"{measured.barrier:.1%}",
            "idle / (idle + work), from the first action of any rank to the last of any",
        ),
        _pair(
            "bubble, chained",
            f"{predicted.chained:.1%}",
            f"{measured.chained:.1%}",
            "of the rank with the most idle time, from its first to its last computation",
        ),
        _pair(
            "pipeline time of a step",
            milliseconds(walls[0]),
            milliseconds(walls[1]),
            f"including {milliseconds(summary.work_seconds)} of computation (mean over ranks)",
        ),
    ]
    if summary.phases.get("step"):
        names = {"gradient-reduce": "reduction", "optimizer": "optimizer"}
        after = ", ".join(
            f"{names[name]} {milliseconds(summary.phases[name])}" for name in PHASES_AFTER_ROW if name in summary.phases
        )
        whole = milliseconds(summary.phases["step"])
        tiles.append(
            f'<div class="tile"><b>whole step</b><span class="big">{whole}</span><small>then {after}</small></div>'
        )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _pair(name: str, predicted: str, measured: str, meaning: str) -> str:
    return (
        f'<div class="tile"><b>{name}</b><span class="big">{measured}</span> '
        f'<span class="plan">planned {predicted}</span><small>{meaning}</small></div>'
    )


def _notes(profile: Profile, summary: Summary, path: Path, num_profiles: int) -> str:
    steps = [step.step for step in summary.pipeline.steps]
    schedule = summary.typical.measured.schedule
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, means over {len(steps)}"
    sentences = [
        f"Profile of {span}: {escape(str(schedule))}. The drawing shows step {summary.typical.measured.step.step}.",
        f"{clocks_text(profile).capitalize()}.",
        f"{oversubscription_text(profile)}." if oversubscription_text(profile) else "",
    ]
    if len(summary.all_shares) > 1:
        low, high = min(summary.all_shares), max(summary.all_shares)
        sentences.append(
            f"This is the pipeline of tp {summary.pipeline.tp_rank}, dp {summary.pipeline.dp_rank}. The measured "
            f"bubble with a barrier is {low:.1%} to {high:.1%} over all {len(summary.all_shares)} recorded pipelines."
        )
    if profile.links:
        link = max(profile.links, key=lambda each: each.latency_seconds + each.transfer_seconds)
        whole = link.latency_seconds + link.transfer_seconds
        latency = (
            f", including {milliseconds(link.latency_seconds)} of latency" if link.transfer_seconds >= 1e-6 else ""
        )
        sentences.append(
            f"Between idle ranks a message of {profile.message_bytes / 2**10:,.0f} KiB takes "
            f"{milliseconds(whole)}{latency}."
        )
    more = f" (the newest of {num_profiles} profiles)" if num_profiles > 1 else ""
    sentences.append(
        f"Data: <code>{escape(path.name)}</code>{more}; "
        f"trace for ui.perfetto.dev: <code>{escape(trace_path(path).name)}</code>."
    )
    return f'<p class="soft">{" ".join(filter(None, sentences))}</p>'


def _drawing(summary: Summary) -> str:
    ranks = summary.pipeline.global_ranks
    drawn = comparison_svg(summary.typical, ranks, with_labels=False)
    width = int(drawn.split('width="', 1)[1].split('"', 1)[0])
    hint = '<p class="soft">Scroll sideways to see the whole drawing.</p>' if width > NARROWEST else ""
    scrolled = f'<div class="scroll" tabindex="0">{drawn}</div>'
    return f'<div class="timeline"><div class="ranks">{labels(ranks)}</div>{scrolled}</div>{hint}'


def _causes(summary: Summary) -> str:
    """Return a waterfall chart: the bar of each cause begins where the previous one ends."""
    rows, at = [], 0.0
    sums: list[float] = [0.0]
    for cause in summary.causes:
        sums.append(sums[-1] + cause.seconds.barrier)
    low, high = min(sums), max(sums)
    scale = 100.0 / ((high - low) or 1.0)
    for cause in summary.causes:
        title, meaning = SHORT[cause.name]
        rows.append(
            _cause_row(title, meaning, at - low, cause.seconds, scale, "add" if cause.seconds.barrier >= 0 else "take")
        )
        at += cause.seconds.barrier
        if cause.name == PREDICTED:
            rows.append(
                _cause_row(
                    "predicted",
                    "simulated with the mean times of each stage",
                    -low,
                    summary.predicted_idle,
                    scale,
                    "sum",
                )
            )
    rows.append(_cause_row("measured", "", -low, summary.measured_idle, scale, "sum"))
    head = "<tr><th>idle time per step</th><th></th><th>barrier</th><th>chained</th></tr>"
    foot = (
        '<p class="soft">In milliseconds. The causes are added to the simulated step one by one, so they add up '
        "exactly to the measured idle time. Barrier: mean over ranks; chained: the rank with the most idle time. "
        "Plan and measurement do the same work.</p>"
    )
    assert len(rows) == len(CAUSES) + 2
    return f'<table class="causes">{head}{"".join(rows)}</table>{foot}'


def _cause_row(title: str, meaning: str, start: float, idle: Idle, scale: float, kind: str) -> str:
    left, width = (start if idle.barrier >= 0 else start + idle.barrier) * scale, abs(idle.barrier) * scale
    bar = f'<div class="bar {kind}" style="left:{left:.2f}%;width:{max(width, 0.4):.2f}%"></div>'
    explained = f"<small>{meaning}</small>" if meaning else ""
    numbers = "".join(f"<td class='n'>{_signed(value, kind)}</td>" for value in idle)
    return f'<tr class="{kind}"><td>{title}{explained}</td><td class="track">{bar}</td>{numbers}</tr>'


def _signed(seconds: float, kind: str) -> str:
    text = f"{seconds * 1e3:+,.2f}" if kind != "sum" else f"{seconds * 1e3:,.2f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _stages(summary: Summary) -> str:
    """Return a table of the mean and standard deviation of each op, one row per stage."""
    ops = [op for op in OPS if any(each.op is op for each in summary.op_times)]
    stages = list(dict.fromkeys(each.stage for each in summary.op_times))
    placement = summary.typical.measured.schedule.placement
    longest = max((each.mean_seconds for each in summary.op_times), default=0.0) or 1.0
    head = "<tr><th>stage</th><th>rank</th>" + "".join(f"<th colspan='2'>{OPS[op]}</th>" for op in ops) + "</tr>"
    rows = []
    for stage in stages[:MOST_STAGES]:
        ranks = placement.ranks_of(int(stage)) if stage.isdigit() else ()
        cells = "".join(
            _op_cell([each for each in summary.op_times if (each.stage, each.op) == (stage, op)], longest) for op in ops
        )
        rank_names = " ".join(str(summary.pipeline.global_ranks[rank]) for rank in ranks)
        rows.append(f"<tr><td>{stage}</td><td>{rank_names}</td>{cells}</tr>")
    rest = f"<p class='soft'>and {len(stages) - MOST_STAGES} more stages</p>" if len(stages) > MOST_STAGES else ""
    foot = (
        '<p class="soft">In milliseconds: mean \N{PLUS-MINUS SIGN} standard deviation over microbatches and steps, '
        "without waits.</p>"
    )
    return f'<table class="ops">{head}{"".join(rows)}</table>{rest}{foot}'


def _op_cell(found: Sequence[OpTime], longest: float) -> str:
    if not found:
        return "<td></td><td></td>"
    (time,) = found
    bar = f'<div class="bar {time.op.value}" style="left:0;width:{100 * time.mean_seconds / longest:.1f}%"></div>'
    numbers = f"{time.mean_seconds * 1e3:,.2f} \N{PLUS-MINUS SIGN} {time.deviation_seconds * 1e3:,.2f}"
    return f'<td class="track small">{bar}</td><td class="n">{numbers}</td>'

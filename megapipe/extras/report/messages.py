"""Numbers, times and states as the report shows them."""

from __future__ import annotations

import time

STATES = {  # Segment.ending -> text
    "ended": "finished",
    "stopped": "stopped early",
    "failed": "failed",
    "running": "running",
    "unknown": "no end recorded",
}


def number(value: float) -> str:
    """Return a number in short form: 12,300; 0.0042; 1.2M."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.3g}G"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def loss_text(value: float | None) -> str:
    """Return a loss as text. value: None if the loss was not finite."""
    return "NaN or infinite" if value is None else f"{value:.4f}"


def bytes_text(count: float) -> str:
    """Return a size such as 1.50 GiB or 512 MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a time such as 90 s, 5 min 3 s, 2 h 10 min or 3 d 4 h."""
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60} s"
    return f"{hours} h {minutes % 60} min" if days == 0 else f"{days} d {hours % 24} h"


def moment(seconds: float) -> str:
    """Return Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

"""`reported`: a loop that says every ten seconds how far it is and what time is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from megapipe.formatting import clock_text

REPORT_SECONDS = 10.0
Item = TypeVar("Item")


def reported(
    items: Sequence[Item], report: Callable[[int, str], None], now: Callable[[], float] = time.perf_counter
) -> Iterator[Item]:
    """Yield the items, and call report(number of finished items, time left) every REPORT_SECONDS before the last."""
    began = last = now()
    for number, item in enumerate(items, 1):
        yield item
        moment = now()
        if moment - last >= REPORT_SECONDS and number < len(items):
            last = moment
            report(number, clock_text((moment - began) / number * (len(items) - number)))

"""Clock offsets of other ranks.

The true offset is within the stated error for any message delays and any clock drift.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megapipe.profile.profile import Clock, ClockReading, RoundTrip, reading

delays = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20)


def trips(offset_ns: int, ways: list[tuple[int, int]], start_ns: int = 0) -> list[RoundTrip]:
    """Build round trips with the given delays there and back, by a clock that is `offset_ns` ahead."""
    return [RoundTrip(start_ns, start_ns + there + offset_ns, start_ns + there + back) for there, back in ways]


@given(offset_ns=st.integers(-(10**12), 10**12), ways=delays)
def test_the_offset_is_within_its_stated_error(offset_ns: int, ways: list[tuple[int, int]]) -> None:
    found = reading(trips(offset_ns, ways))
    assert abs(found.offset_ns - offset_ns) <= found.error_ns <= min(there + back for there, back in ways) // 2 + 1


@given(offset_ns=st.integers(-(10**10), 10**10), drift_ppm=st.integers(-100, 100), at=st.floats(0, 1))
def test_a_drift_between_two_readings_is_taken_out(offset_ns: int, drift_ppm: int, at: float) -> None:
    span_ns = 10 * 10**9
    drift_ns = span_ns * drift_ppm // 10**6
    clock = Clock(ClockReading(0, offset_ns, 0), ClockReading(span_ns, offset_ns + drift_ns, 0))
    here = round(span_ns * at)
    there = here + offset_ns + round(drift_ns * at)
    assert abs(clock.to_local(there) - here) <= abs(drift_ns) * abs(drift_ppm) // 10**6 + 2


def test_a_shared_clock_is_left_as_it_is() -> None:
    assert Clock().to_local(123) == 123 and Clock().is_shared and Clock().error_ns == 0
    assert Clock(ClockReading(0, 5, 2), ClockReading(10, 5, 7)).error_ns == 7

"""Weight versions of the asynchronous schedules.

They follow the published formulas, and no buffer is overwritten while a microbatch still needs it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.action import Op
from megapipe.schedule.families import SCHEDULES, build_lowered, build_schedule
from megapipe.schedule.lifetimes import WeightVersions, one_group_stale, stashed, weight_versions
from megapipe.schedule.schedule import Schedule

RANKS = st.integers(1, 8)
COUNTS = st.integers(1, 40)


def num_buffers(versions: WeightVersions) -> int:
    return 1 + max(versions.buffer_of)


def versions_of(schedule: Schedule, group: int) -> list[WeightVersions]:
    rule = SCHEDULES[schedule.name].versions
    assert rule is not None
    return [weight_versions(schedule, rank, rule, group) for rank in range(schedule.num_ranks)]


@settings(max_examples=40)
@given(RANKS, COUNTS)
def test_pipedream_is_p_minus_1_minus_r_updates_late_and_stashes_p_minus_r_versions(p: int, m: int) -> None:
    for r, versions in enumerate(versions_of(build_schedule("pipedream", p, 1, m), p)):
        assert versions.version_of == tuple(max(0, k - (p - 1 - r)) for k in range(m))
        assert num_buffers(versions) <= p - r
        assert num_buffers(versions) == p - r or m < 2 * (p - 1 - r), "a long stretch fills them all"
        assert versions.group_sizes == (1,) * m


@settings(max_examples=40)
@given(RANKS, COUNTS, st.integers(0, 5))
def test_2bw_is_one_group_late_and_needs_two_versions(p: int, m: int, more: int) -> None:
    group = p + more
    for versions in versions_of(build_schedule("pipedream-2bw", p, 1, m, group), group):
        assert versions.version_of == tuple(max(0, k // group - 1) for k in range(m))
        assert num_buffers(versions) <= 2
        assert sum(versions.group_sizes) == m
        assert set(versions.group_sizes[:-1]) <= {group}
    assert (
        p == 1 or m <= group or num_buffers(versions_of(build_schedule("pipedream-2bw", p, 1, m, group), group)[0]) == 2
    )


@settings(max_examples=60)
@given(st.sampled_from(["pipedream", "pipedream-2bw"]), RANKS, COUNTS)
def test_a_microbatch_finds_in_its_backward_the_buffer_of_its_forward(name: str, p: int, m: int) -> None:
    schedule = build_lowered(name, p, 1, m)
    for row, versions in zip(schedule.rows, versions_of(schedule, p), strict=True):
        content, updates, found = {0: 0}, 0, {}
        for _, op, k in row:
            if op is Op.F:
                found[k] = content[versions.buffer_of[versions.version_of[k]]]
                assert found[k] == versions.version_of[k]
            elif op is Op.B:
                assert content[versions.buffer_of[versions.version_of[k]]] == found[k]
            elif op is Op.UPDATE:
                updates += 1
                content[versions.buffer_of[updates]] = updates
        assert updates == len(versions.group_sizes)


def test_groups_smaller_than_the_pipeline_come_before_their_version() -> None:
    schedule = build_schedule("pipedream-2bw", 4, 1, 12)
    with pytest.raises(ScheduleError, match=r"0F4 on rank 0 uses weight version 1, the newest is 0"):
        weight_versions(schedule, 0, one_group_stale, group_size=2)


def test_synchronous_families_have_no_rule() -> None:
    assert {name for name, family in SCHEDULES.items() if family.versions is not None} == {"pipedream", "pipedream-2bw"}
    assert SCHEDULES["pipedream"].versions is stashed

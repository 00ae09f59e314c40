"""Settings that megapipe derives from Megatron's flags equal those of Megatron-Core, or differ for a stated reason."""

from __future__ import annotations

import pytest

from tests.config.megatron_settings import (
    BEGIN,
    DIFFERENCES,
    END,
    NOT_COMPARED,
    PAGE,
    Case,
    cases,
    compare,
    rows,
    table_of,
    varying,
)

EVERYDAY = 60


def test_settings_derived_from_the_same_flags_are_equal_or_differ_on_purpose() -> None:
    found = compare(cases()[:EVERYDAY])
    assert not found.unexpected, "\n".join(found.unexpected)
    assert found.compared > 3000


def test_all_sets_of_flags_and_the_table_of_the_page() -> None:
    found = compare(cases())
    assert not found.unexpected, "\n".join(found.unexpected)
    assert found.known.keys() == set(DIFFERENCES), "a difference that no set of flags shows"
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert table == table_of(found), "write it again: python -m tests.config.megatron_settings"


def test_every_setting_that_varies_is_compared_or_has_a_reason() -> None:
    compared = {name for row in rows() for name in row.names}
    excused = {name for names in NOT_COMPARED.values() for name in names.split()}
    assert not varying() - compared - excused
    assert not compared & excused


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--quick-geglu", "model.ffn_hidden_size", 1),
        ("--disable-bias-linear", "model.hidden_dropout", 0.75),
        ("--num-query-groups", "model.num_query_groups", 3),
        ("--lr-warmup-fraction", "schedule.lr_warmup_steps", 1),
    ],
    ids=["width", "dropout", "query_groups", "warmup"],
)
def test_a_wrong_value_is_found(flag: str, name: str, value: object) -> None:
    accepted = (case for case in cases() if case.settings is not None and flag in case.flags.split())
    case = next(case for case in accepted if compare([case]).compared)
    assert case.settings is not None and not compare([case]).unexpected
    (found,) = compare([Case(case.ranks, case.flags, case.settings | {name: value})]).unexpected
    assert found.startswith(f"{name}: {value} in Megatron")

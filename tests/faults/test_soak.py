"""A short soak: several kinds of faults in sequence; the final weights are those of an undisturbed run.

The long one: python -m tests.faults.soak --minutes 30 --out FOLDER
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import FAULTS, Plan, Soak


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_half_a_minute_of_faults_changes_nothing(tmp_path: Path) -> None:
    report = Soak(Plan(0.5, (2.0, 5.0), save_interval=4), tmp_path / "soak").run()
    assert report["equal_to_the_bit"] and report["faults"] >= 1
    assert set(report["kinds"]) <= set(FAULTS)
    assert report["most_lost"] <= 2 * 4 + 2
    print({key: value for key, value in report.items() if key != "struck"})

"""Every rank of a large world is audited in plain Python; equivalent ranks do the same."""

from __future__ import annotations

import pytest

from megapipe.errors import CommunicationError
from megapipe.extras.dry_run.rank import audit_grid, kinds_of_ranks
from megapipe.topology import GROUP_NAMES, Topology
from tests.extras.dry_run.grids import PP4, SP2, ZERO1, make_plan

LARGE = PP4 | SP2 | ZERO1 | {"global_batch_size": 512, "micro_batch_size": 1}


def test_every_rank_of_a_large_world_is_in_its_groups() -> None:
    plan = make_plan(512, LARGE)
    assert audit_grid(plan) == sum(len(plan.topology.groups(name)) for name in GROUP_NAMES)


def test_a_rank_that_two_groups_claim_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(16, LARGE | {"global_batch_size": 16})
    whole = Topology.groups
    monkeypatch.setattr(
        Topology, "groups", lambda self, name: whole(self, name)[:-1] if name == "kv" else whole(self, name)
    )
    with pytest.raises(CommunicationError, match="rank 15 is in 0 groups kv"):
        audit_grid(plan)


def test_kinds_group_ranks_by_their_actions() -> None:
    plan = make_plan(512, LARGE)
    kinds = kinds_of_ranks(plan)
    assert sorted(rank for kind in kinds for rank in kind.ranks) == list(range(512))
    assert [kind.pp_ranks for kind in kinds] == [(0,), (1,), (2,), (3,)]  # the warm-up phases of 1F1B differ
    gpipe = kinds_of_ranks(
        make_plan(512, LARGE | {"pipeline_schedule": "gpipe", "pipeline_model_parallel_layout": "E|tttt|tttt|L"})
    )
    assert [kind.pp_ranks for kind in gpipe] == [(0,), (1, 2), (3,)]


def test_ranks_of_one_kind_have_the_same_layers() -> None:
    """Windows and rotary positions change no shape of a parameter, but the memory of a stage."""
    gpipe = PP4 | {"pipeline_schedule": "gpipe", "pipeline_model_parallel_layout": "E|tttt|tttt|L", "window_size": 32}
    for pattern, kinds in ((("1", "3 window_size=none", "..."), 3), (("4", "4 window_size=none"), 4)):
        assert len(kinds_of_ranks(make_plan(4, gpipe | {"layer_pattern": pattern}))) == kinds

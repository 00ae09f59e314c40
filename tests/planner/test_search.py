"""The search: legal, as good as looking at everything, never hurt by more memory; and its mistakes answered."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.planner.hardware import GIB, Hardware, hardware_named
from megapipe.planner.resolve import resolve, vary
from megapipe.planner.search import RECOMPUTES, Layout, _Bounds, layouts, predict, search
from tests.planner.test_resolve import wish

H100 = hardware_named("h100")
FAMILIES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2))


def small(**changes: object) -> Config:
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 512}
    return wish(**{**model, "dtype": "bf16", "global_batch_size": 8, **changes})


def with_memory(gib: float) -> Hardware:
    return dataclasses.replace(H100, memory_bytes=int(gib * GIB))


def tight(config: Config, world_size: int) -> float:
    """Memory in GiB that some layouts fit and others do not."""
    peaks = sorted(each.peak_bytes for each in search(config, world_size, H100, num_best=50).best)
    return peaks[len(peaks) // 3] / H100.memory_share / GIB


@pytest.mark.parametrize(("world_size", "changes"), [(4, {}), (4, {"num_layers": 6, "hidden_dropout": 0.0, "attention_dropout": 0.0})])
def test_the_best_is_that_of_predicting_every_layout(world_size: int, changes: dict[str, object]) -> None:
    config = small(**changes)
    for hardware in (H100, with_memory(tight(config, world_size))):
        every = []
        for tp, pp, (schedule, chunks), size, recompute in itertools.product((1, 2, 4), (1, 2, 4), FAMILIES, (1, 2, 4), RECOMPUTES):
            try:
                every.append(predict(config, Layout(tp, pp, chunks, schedule, size, recompute), world_size, hardware))
            except ConfigError:
                continue
        fitting = [each.time.seconds for each in every if each.peak_bytes <= hardware.usable_bytes]
        assert len(fitting) > 10
        best = search(config, world_size, hardware).best
        assert best[0].time.seconds == pytest.approx(min(fitting), rel=1e-3)
        assert all(each.peak_bytes <= hardware.usable_bytes for each in best)


def test_every_layout_it_proposes_is_one_that_training_accepts() -> None:
    config = small()
    for each in search(config, 4, H100).best:
        plan = resolve(each.layout.applied_to(config), 4, H100.ranks_per_node)
        assert (plan.topology.tp, plan.topology.pp, plan.schedule_name) == (each.layout.tp, each.layout.pp, each.layout.schedule)


def test_more_memory_never_makes_the_best_slower() -> None:
    config = small()
    least = tight(config, 4)
    times = [search(config, 4, with_memory(least * factor)).best[0].time.seconds for factor in (1.0, 1.1, 1.3, 2.0)]
    assert times == sorted(times, reverse=True)


def test_no_bound_is_above_its_prediction() -> None:
    config, count = small(), 0
    bounds = _Bounds(config, 4, H100)
    for layout in layouts(config, 4, H100):
        try:
            found = predict(config, layout, 4, H100)
        except ConfigError:
            continue
        bound = bounds.of(layout)
        assert bound is not None
        assert bound.seconds <= found.time.seconds * (1 + 1e-9), layout
        assert bound.least_bytes <= found.peak_bytes, layout
        count += 1
    assert count > 50


def test_a_varied_plan_is_the_one_that_resolve_makes() -> None:
    first, second = small(), small(micro_batch_size=1, global_batch_size=16, recompute_granularity="selective")
    assert vary(resolve(first, 2), second) == resolve(second, 2)


def test_without_a_global_batch_or_a_model_that_fits_it_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="--global-batch-size is missing"):
        search(small(global_batch_size=None), 4, H100)
    with pytest.raises(ConfigError, match=r"does not fit on 4 h100.*take more"):
        search(small(), 4, with_memory(0.0001))
    with pytest.raises(ConfigError, match="must be a multiple of the"):
        search(small(global_batch_size=7, num_layers=1, num_attention_heads=1), 64, H100)


def test_llama3_405b_is_predicted_within_15_percent_of_its_published_share_of_the_peak() -> None:
    """Dubey et al. 2024 (arXiv:2407.21783), section 3.3: 38 to 43 % MFU on 8,192 and 16,384 H100, tp 8 x pp 16."""
    from megapipe.cli.plan import plan_for
    from megapipe.planner.step_time import predict_step

    plan = plan_for(["--config", "configs/llama3_405b.yaml"], 16384, 8)
    assert 0.38 / 1.15 <= predict_step(plan, H100).mfu <= 0.43 * 1.15

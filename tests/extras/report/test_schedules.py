from megapipe.extras.report.schedules import Measures, Model, Unmeasured, compare, measure
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Seconds
from megapipe.schedule.families import SCHEDULES, build_schedule


def by_name(rows):
    return {row.schedule: row for row in rows}


def test_the_table_of_8_ranks_and_32_microbatches():
    rows = by_name(
        compare(Model(8, Seconds(1.0, 1.0, 1.0)), 8, 2, 32, names=[name for name in SCHEDULES if name != "zb-auto"])
    )
    shares = {
        name: (round(row.barrier_share, 4), round(row.chained_share, 4), row.peak_microbatches)
        for name, row in rows.items()
    }
    assert shares == {
        "naive": (0.875, 0.875, 1),
        "gpipe": (0.1795, 0.1795, 32),
        "1f1b": (0.1795, 0.1795, 8),
        "interleaved": (0.0986, 0.0986, 11.5),
        "breadth-first": (0.0986, 0.0986, 32),
        "hanayo": (0.2672, 0.2672, 8),
        "chimera": (0.2381, 0.2381, 8),
        "zb-h1": (0.068, 0.068, 8),
        "zb-h2": (0.068, 0, 15),
        "zb-v": (0.0352, 0, 8),
        "v-half": (0.0813, 0.0813, 5),
        "v-min": (0.107, 0.107, 4),
        "dualpipe": (0.0588, 0.0588, 9),
        "dualpipe-v": (0.068, 0.068, 8.5),
        "pipedream": (0, 0, 8),
        "pipedream-vertical-sync": (0, 0, 8),
        "pipedream-2bw": (0, 0, 8),
        "paci": (0, 0, 8),
    }
    assert all(row.work_seconds == 96 for row in rows.values())  # all schedules run the same model and step
    assert {name: row.weight_versions for name, row in rows.items() if not row.is_synchronous} == {
        "pipedream": 8,
        "pipedream-vertical-sync": 8,
        "pipedream-2bw": 2,
        "paci": 1,
    }


def test_zb_auto_keeps_its_limit_and_is_no_slower_than_handmade():
    rows = by_name(
        compare(Model(4, Seconds(1.0, 1.2, 0.7), latency_seconds=0.05), 4, 2, 12, names=["zb-h1", "zb-h2", "zb-auto"])
    )
    for limit, handmade in ((4, "zb-h1"), (8, "zb-h2")):
        auto = rows[f"zb-auto {limit}"]
        assert auto.peak_microbatches <= limit
        assert auto.barrier_share <= rows[handmade].barrier_share


def test_impossible_schedules_are_in_the_table_with_the_reason():
    rows = by_name(
        compare(Model(3, Seconds(1.0, 1.0, 1.0)), 3, 2, 5, names=["1f1b", "dualpipe", "dualpipe-v", "nonsense"])
    )
    assert isinstance(rows["1f1b"], Measures)
    assert "use 2 or 4" in rows["dualpipe"].refused
    assert "use 6" in rows["dualpipe-v"].refused
    assert "unknown" in rows["nonsense"].refused
    assert isinstance(rows["nonsense"], Unmeasured)


def test_stages_share_the_layers_of_the_ranks():
    costs = Model(4, Seconds(2.0, 20.0, 200.0), transfer_seconds=0.5, pair_share=0.75).costs(8)
    assert [costs.seconds[7, op] for op in (Op.F, Op.I, Op.W, Op.B)] == [1, 10, 100, 110]
    assert costs.seconds[1, Op.SEND_B] == 0.5
    assert costs.pair_seconds[1, 0] == 0.75 * (1 + 110)


def test_bytes_and_the_optimizer_enter_the_measures():
    model = Model(4, Seconds(1.0, 1.0, 1.0), activation_bytes=1000.0, optimizer_seconds=2.5)
    measures, _ = measure(build_schedule("interleaved", 4, 2, 8), model)
    assert measures.peak_bytes == 11 * 500
    assert measures.step_seconds == measures.makespan_seconds + 2.5
    assert measure(build_schedule("dualpipe", 4, 1, 8), model)[0].peak_bytes == 5 * 1000

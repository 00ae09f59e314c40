"""A measured hardware file moves the parts of a predicted step that use what it measures, and no others.

The file is that of eight emulated GPUs of one node; the predictions are of 8 and of 512. 'bubble' is the rest of the
schedule, and moves with all others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.config.load import load_config
from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.plan.hardware import HARDWARE, Hardware
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import StepTime, predict_step
from tests.tables import rows

# as `megapipe calibrate` writes it, with the copies to the host that it does not measure
FILE = {
    "name": "emulated",
    "driver_name": "NVIDIA H100 80GB HBM3",
    "flops": "{bf16: 7.0e+14, fp8: 1.2e+15}",
    "memory_bytes": 85899345920,
    "memory_bytes_per_second": "2.8e+12",
    # the network is slower than the links of a node, for eight cards together too, and stays so: it bounds a ring over
    # both, and an all-to-all
    "node": "{bytes_per_second: 3.4e+11, latency_seconds: 1.0e-05}",
    "network": "{bytes_per_second: 2.0e+10, latency_seconds: 3.0e-05}",
    "ranks_per_node": 8,
    "gemm_shares": "[[256, 0.3], [1024, 0.6], [4096, 0.8]]",
    "attention_share": 0.5,
    "pointwise_share": 0.8,
    "host_bytes_per_second": "2.0e+10",
}
WORSE = {
    "memory_bytes_per_second": "1.4e+12",
    "node": "{bytes_per_second: 1.7e+11, latency_seconds: 2.0e-05}",
    "network": "{bytes_per_second: 1.0e+10, latency_seconds: 6.0e-05}",
    "attention_share": 0.25,
    "pointwise_share": 0.4,
    "host_bytes_per_second": "1.0e+10",
}
# nothing is hidden by computation, so that each part depends on its own figures alone
PLAIN = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --vocab-size 128256 --position-embedding-type rope --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 "
    "--device cuda --micro-batch-size 1 --global-batch-size 512 --use-distributed-optimizer"
)
EVERY = {  # what moves in every plan
    "memory_bytes_per_second": {"pointwise", "optimizer"},
    "attention_share": {"attention"},
    "pointwise_share": {"pointwise"},
}
PLANS = {row[3]: row[:3] for row in rows(Path(__file__).with_name("hardware_moves.tsv"))}


def measured(folder: Path, **changed: object) -> Hardware:
    path = folder / "measured.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in (FILE | changed).items()))
    return read_hardware(path)


def predicted(world_size: int, flags: str, hardware: Hardware) -> StepTime:
    config = load_config(["--plan", *PLAIN.split(), *flags.split()], is_job=False).config
    return predict_step(resolve(config, world_size, hardware.ranks_per_node), hardware)


@pytest.mark.parametrize("key", WORSE)
@pytest.mark.parametrize("name", PLANS)
def test_a_worse_figure_lengthens_the_parts_that_use_it_and_no_other(tmp_path: Path, name: str, key: str) -> None:
    ranks, flags, moves = PLANS[name]
    before = predicted(int(ranks), flags, measured(tmp_path))
    after = predicted(int(ranks), flags, measured(tmp_path, **{key: WORSE[key]}))
    moved = {figure: set(parts.split(",")) for figure, _, parts in (word.partition("=") for word in moves.split())}
    lengthened, expected = set(), (EVERY | moved).get(key, set())
    for part in before.parts.keys() - {"bubble"}:
        if part == "host" and key in EVERY:
            continue  # slower computation hides more of the copies
        change = after.parts[part] / before.parts[part] - 1.0 if before.parts[part] else 0.0
        if abs(change) > 1e-9:
            lengthened.add(part)
            assert change > 0.0, (part, change)
    assert lengthened == expected
    assert (after.seconds > before.seconds * (1 + 1e-9)) == bool(expected)


def test_a_file_of_eight_predicts_512_by_the_same_model(tmp_path: Path) -> None:
    # a row of the table, written down and read again, is the row
    h100 = HARDWARE["h100"]
    path = tmp_path / "same.yaml"
    path.write_text("like: h100\nranks_per_node: 8\n")
    flags = "--tensor-model-parallel-size 8 --sequence-parallel"
    for world_size in (8, 512):
        assert predicted(world_size, flags, read_hardware(path)).parts == predicted(world_size, flags, h100).parts
    # a rank computes as long on 512 as on 8, with as many microbatches; only what crosses nodes is added
    eight = predicted(8, f"{flags} --global-batch-size 8", measured(tmp_path)).parts
    many = predicted(512, flags, measured(tmp_path)).parts
    for part in ("gemm", "attention", "pointwise", "tp"):
        assert many[part] == pytest.approx(eight[part]) and many[part] > 0
    assert (eight["reduce"], eight["gather"]) == (0.0, 0.0) and min(many["reduce"], many["gather"]) > 0

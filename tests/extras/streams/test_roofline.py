"""The roofline: seconds of launches by hand, what nothing hides, the step of counted layers, and one message for a
mistake.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megapipe.extras.streams.launches import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COLLECTIVE,
    GEMM,
    HOST_WAIT,
    KERNEL_SECONDS,
    MESSAGE,
    Ends,
    Kind,
    Launch,
    achievable,
    collective_seconds,
    described,
    launch_seconds,
    ranks_to_count,
)
from megapipe.extras.streams.order import COMMUNICATOR, HOST, Mark, Wait
from megapipe.extras.streams.roofline import read, roofline_of, roofline_text, written
from megapipe.extras.streams.timeline import timed
from megapipe.plan.hardware import hardware_named
from megapipe.plan.traces import layer_trace
from tests.tables import rows
from tests.tiny import plan_for

pytestmark = pytest.mark.timeout(200)
H100 = hardware_named("h100")
PAGE = Path(__file__).parents[3] / "docs" / "without_gpu.md"
TEXT = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
(FLAGS,) = re.findall(r"^megapipe plan --roofline --gpu h100 (--config configs/llama3_8b.yaml .*)$", TEXT, re.M)
# rows of the page: flags, kernels and collectives of a layer, its milliseconds, MFU of the step
ROWS = re.findall(r"^\| `(--.*)` \| (\d+) \|(?: (\d+))? \| ([\d.]+) \| ([\d.]+%) \|$", TEXT, re.M)
LLAMA_8B = ["--config", str(PAGE.parents[1] / "configs" / "llama3_8b.yaml"), "--global-batch-size", "4"]
EXPERTS_OF_NODES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 64 --micro-batch-size 1 "
    "--global-batch-size 8 --bf16 --num-experts 8 --moe-router-topk 2 --tensor-model-parallel-size 2 "
    "--sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 2 --disable-bias-linear "
    "--moe-token-dispatcher-type flex --lr 1e-3 --train-iters 1"
)
MAIN, TP = "the default stream", f"{COMMUNICATOR}tp"


def launch(queue: str = MAIN, kind: str = "", num_bytes: float = 0.0, name: str = "x", **fields: Any) -> Launch:
    return Launch(queue, name, "a:b", 0, "part", "F", 0, 0, num_bytes, kind)._replace(**fields)


def test_messages_of_experts_take_the_links_of_their_groups() -> None:
    plan = plan_for(EXPERTS_OF_NODES.split(), 8, 4)
    hardware = achievable(H100)

    def seconds(group: str, name: str = "all_to_all") -> float:
        return collective_seconds(launch(name=name, num_bytes=1e9, group=group), plan, hardware)

    assert len(plan.topology.group_of("ep_nodes", 0)) == len(plan.topology.group_of("ep_places", 0)) == 2
    for group, name, link in (
        ("ep_nodes", "all_to_all", hardware.network),
        ("ep_places", "all_to_all", hardware.node),
        ("etp", "all_gather", hardware.node),
    ):
        assert seconds(group, name) == pytest.approx(0.5e9 / link.bytes_per_second + link.latency_seconds)


def test_launches_take_what_their_bytes_and_flops_say() -> None:
    seconds = launch_seconds(plan_for(LLAMA_8B, 8), achievable(H100))
    assert seconds(launch(num_bytes=2.5e9)) == pytest.approx(1e-3 + KERNEL_SECONDS)
    assert seconds(launch(kind=GEMM, flops=690e9, dtype="bfloat16")) == pytest.approx(1e-3 + KERNEL_SECONDS)
    assert seconds(launch(kind=GEMM, flops=690e9, dtype="float8_e4m3fn")) == pytest.approx(0.5e-3, rel=0.01)
    assert seconds(launch(kind=GEMM, flops=690e9, dtype="float32")) == pytest.approx(16e-3, rel=0.01)
    assert seconds(launch(kind=GEMM, num_bytes=2.5e9, flops=1, dtype="bfloat16")) == pytest.approx(1e-3, rel=0.01)
    assert seconds(launch(kind=ATTENTION, flops=600e9, dtype="bfloat16")) == pytest.approx(1e-3, rel=0.01)
    assert seconds(launch(kind=ATTENTION_BACKWARD, flops=480e9, dtype="bfloat16")) == pytest.approx(1e-3, rel=0.01)
    assert seconds(launch(kind=MESSAGE, num_bytes=1e9)) == seconds(launch(kind=HOST_WAIT)) == 0.0


def test_a_collective_takes_its_ring_and_an_all_reduce_two() -> None:
    seconds = launch_seconds(plan_for(LLAMA_8B, 8), achievable(H100))  # tp 4
    once = 0.75 * 1e9 / H100.node.bytes_per_second + 3 * H100.node.latency_seconds
    gather = launch(TP, COLLECTIVE, 1e9, name="all_gather", group="tp")
    assert seconds(gather) == pytest.approx(once)
    assert seconds(gather._replace(name="all_reduce")) == pytest.approx(2 * once)


COLLECTIVES = launch(TP, COLLECTIVE, 5, group="tp")
START, END = [Mark("e", MAIN), Wait(TP, "e")], [Mark("f", TP)]
# log -> seconds that each launch adds; a launch takes as many seconds as it has bytes
TIMELINES: dict[str, tuple[list[Any], list[float]]] = {
    "waited for at once": ([*START, COLLECTIVES, *END, Wait(MAIN, "f"), launch(num_bytes=1)], [5, 1]),
    "hidden": ([*START, COLLECTIVES, *END, launch(num_bytes=7), Wait(MAIN, "f"), launch(num_bytes=1)], [0, 7, 1]),
    "hidden in part": (
        [*START, COLLECTIVES, *END, launch(num_bytes=3), Wait(MAIN, "f"), launch(num_bytes=1)],
        [2, 3, 1],
    ),
    "after a kernel": (
        [launch(num_bytes=4), *START, COLLECTIVES, *END, Wait(MAIN, "f"), launch(num_bytes=1)],
        [4, 5, 1],
    ),
    "another stream computes": (
        [*START, COLLECTIVES, *END, Wait(MAIN, "f"), launch(num_bytes=1), launch("stream 2", num_bytes=4)],
        [1, 1, 4],
    ),
    "two in one communicator": (
        [*START, COLLECTIVES, COLLECTIVES, *END, launch(num_bytes=6), Wait(MAIN, "f"), launch(num_bytes=1)],
        [0, 4, 6, 1],
    ),
    "the host waits": (
        [*START, COLLECTIVES, *END, Wait(MAIN, "f"), Mark("g", MAIN), Wait(HOST, "g"), launch("stream 2", num_bytes=1)],
        [5, 1],
    ),
    "never waited for": ([*START, COLLECTIVES, *END, launch(num_bytes=1)], [0, 1]),
    "an event without a mark": ([Wait(MAIN, "none"), launch(num_bytes=1)], [1]),
}


@pytest.mark.parametrize("name", TIMELINES)
def test_a_collective_adds_what_nothing_hides(name: str) -> None:
    log, expected = TIMELINES[name]
    assert [seconds for _, seconds in timed(log, lambda each: each.num_bytes)] == expected


def test_logs_are_read_as_they_were_written() -> None:
    logs = {3: [launch(num_bytes=1.5), Mark("e", MAIN), Wait(HOST, "e")]}
    assert read(written(logs)) == logs


def test_ranks_with_all_kinds_of_layers_are_counted() -> None:
    flags = [*LLAMA_8B, "--tensor-model-parallel-size", "1", "--no-sequence-parallel"]
    assert sorted(ranks_to_count(plan_for([*flags, "--pipeline-model-parallel-size", "4"], 4))) == [0, 1, 3]
    assert ranks_to_count(plan_for(flags, 1)) == (0,)


@pytest.mark.usefixtures("fake_device")
def test_the_page_shows_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    (block,) = re.findall(r"^```\n(roofline of .*?)^```", TEXT, re.M | re.S)
    shown = [line for line in block.splitlines() if line != "..."]
    printed = iter(roofline_text(shlex.split(FLAGS), H100).splitlines())
    assert not [line for line in shown if line not in printed]


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("row", ROWS, ids=["blocks", "fp8", "tp8"])
def test_the_page_has_the_numbers_of_other_flags(row: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    flags, kernels, collectives, milliseconds, mfu = row
    text = roofline_text(shlex.split(f"{FLAGS} {flags}"), H100)
    layer = re.search(r"^layer, .* backward ([\d.]+) ms", text, re.M)
    total = re.search(r"^  sum +(\d+) +(?:(\d+) +)?[\d.]+ ", text, re.M)
    step = re.search(r"^a step of .* MFU ([\d.]+%)", text, re.M)
    assert layer and total and step, text
    assert (total[1], total[2] or "", layer[1], step[1]) == (kernels, collectives, milliseconds, mfu)


WRITTEN_OUT = {
    "softmax": "--attention-softmax-in-fp32 --attention-dropout 0",
    "dropout": "--attention-dropout 0.1",
    "cap": "--attn-logit-softcapping 30 --attention-dropout 0",
}


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_written_out_attention_moves_the_planned_bytes(name: str) -> None:
    words = (
        "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 2048 --vocab-size 512 --bf16 "
        f"--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 {WRITTEN_OUT[name]}"
    ).split()
    text = roofline_text([*words, "--world-size", "1"], H100)
    counted = re.search(r"^  core_attention +\d+ +[\d.]+ +([\d.]+) ", text, re.M)
    plan = plan_for(words, 1)
    works = layer_trace(plan.model.layers[0], plan.shape).attention
    assert counted and sum(work.moved_bytes for work in works) / 1e9 == pytest.approx(float(counted[1]), rel=0.08)


SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --micro-batch-size 1 "
    "--bf16 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --global-batch-size 32"
)
CASES = [pytest.param(*row[:4], id=row[4]) for row in rows(Path(__file__).with_name("roofline.tsv"))]


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(("world_size", "flags", "kinds", "groups"), CASES)
def test_a_step_has_all_kinds_of_layers_and_adds_up(world_size: str, flags: str, kinds: str, groups: str) -> None:
    found, _ = roofline_of(f"{SMALL} {flags} --world-size {world_size}".split(), H100)
    assert {described(kind, spec) for kind, (_, spec) in found.layers.items()} == set(kinds.split(" + "))
    assert {kind for kind in found.works if isinstance(kind, Kind)} == set(found.layers)
    for kind, (numbers, _) in found.layers.items():
        work = found.works[kind]
        assert numbers and work.total.kernels > 20 and work.total.flops > 0
        ops = {op.value: sum(parts.values()) for op, parts in work.seconds.items()}
        whole = ops["F"] + max(ops.get("B", 0.0), ops.get("I", 0.0) + ops.get("W", 0.0))
        assert whole == pytest.approx(work.total.seconds, rel=0.2)
    assert any(isinstance(owner, Ends) and owner.has_head for owner in found.works)
    assert set(groups.split(",")) - {"-"} <= {part for part, seconds in found.step.parts.items() if seconds > 0}
    assert found.step.parts["layers"] > 0 and all(seconds > -1e-6 for seconds in found.step.parts.values())
    assert found.seconds == pytest.approx(found.step.seconds - found.step.parts["optimizer"] + found.update_seconds)
    assert 0 < found.step.mfu < 1


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    words = ["plan", "--roofline", *SMALL.split(), "--world-size", "1", "--gpu", "h100"]
    command = [sys.executable, "-m", "megapipe", *words]
    environment = os.environ | {"PATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 2
    assert_one_message(ended.stdout, ended.stderr, "--roofline counts on a fake CUDA device, which it compiles: g++")


def assert_one_message(out: str, error: str, message: str) -> None:
    assert error.startswith(f"error: {message}") and len(error.strip().splitlines()) == 1, error
    assert "roofline of" not in out

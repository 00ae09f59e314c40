"""The table of accelerators, and hardware files that replace it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.errors import ConfigError
from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.plan.hardware import HARDWARE, hardware_named, hardware_of, peak_flops, wave_share


def test_a_hardware_file_based_on_a_row_changes_only_its_own_values(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "like: h100\nname: mine\nmemory_bytes: 1e11\nnetwork: {bytes_per_second: 1e9, latency_seconds: 1e-5}\n"
    )
    mine, h100 = read_hardware(path), hardware_named("H100")
    assert (mine.name, mine.memory_bytes, mine.network.bytes_per_second) == ("mine", 10**11, 1e9)
    assert (mine.flops, mine.node, mine.gemm_shares) == (h100.flops, h100.node, h100.gemm_shares)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: h100\nmemory: 3", "memory is not a key"),
        ("name: mine", "lacks .*flops"),
        ("like: h100\nnode: fast", "node 'fast'"),
        ("like: h100\nnum_sms: 0", "num_sms 0 is not what the key holds, with numbers above 0"),
        ("like: h100\ngemm_highest: [0.6]", "gemm_highest .0.6. is not"),
        ("like: h100\nattention_share: .nan", "attention_share nan is not"),
        ("like: h100\nnetwork: {bytes_per_second: -1.0e+10, latency_seconds: 0}", "network .* is not"),
        ("- 1", "expected keys"),
        ("like: z9", "not in the table"),
    ],
    ids=["unknown", "missing", "value", "zero", "one", "nan", "negative", "list", "like"],
)
def test_a_wrong_file_is_refused_with_its_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hardware(path)


def test_a_gemm_reaches_more_of_the_peak_the_deeper_it_is() -> None:
    for hardware in HARDWARE.values():
        shares = [hardware.gemm_share(8192, 8192, depth) for depth in (1, 64, 100, 512, 3000, 8192, 100000)]
        assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < hardware.gemm_highest[0] < 1
        assert hardware.gemm_share(4096, 4096, 375) <= hardware.gemm_highest[0] / 2


@pytest.mark.parametrize(
    ("rows", "columns", "share"),
    [
        (128 * 132, 256, 1.0),  # one full wave
        (128, 256, 0.93 * 2 / 132),  # two small tiles on two multiprocessors rather than a large one
        (64, 256, 0.93 / 132),  # half of each is padding
        (128 * 133, 256, 0.93 * 266 / 396),  # three waves of small tiles rather than two of large ones
    ],
)
def test_tiles_are_computed_in_waves(rows: int, columns: int, share: float) -> None:
    assert wave_share(rows, columns, 132) == wave_share(columns, rows, 132) == pytest.approx(share)


def test_measured_shares_replace_depth_and_waves(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("like: h100\ngemm_shares: [[256, 0.3], [1024, 0.6]]\n")
    hardware = read_hardware(tmp_path / "mine.yaml")
    assert hardware.gemm_share(5000, 512, 7000) == pytest.approx(0.45)
    assert hardware.gemm_share(128, 512, 7000) == pytest.approx(0.15) and hardware.gemm_share(*3 * (9999,)) == 0.6


def test_names_of_the_driver_lead_to_their_peaks() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None and peak_flops("cpu", "bf16") is None


@pytest.mark.parametrize(("gpus", "node"), [(8, 8), (72, 72), (144, 72), (64, 64), (128, 64), (256, 64), (96, 48)])
def test_a_rack_is_a_node_of_as_many_gpus_as_divide_them(gpus: int, node: int) -> None:
    assert hardware_named("gb200").on(gpus).ranks_per_node == node
    assert hardware_named("h100").on(gpus) is hardware_named("h100")


@pytest.mark.parametrize("name", ["RTX4090", "rtx 4090", "Rtx-4090", "RTX_4090"])
def test_names_are_matched_without_case_blanks_and_dashes(name: str) -> None:
    assert hardware_named(name) is HARDWARE["rtx-4090"]


def test_an_unknown_gpu_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"rtx-5090.*v100-32"):
        hardware_named("rtx-4095")


@pytest.mark.parametrize(
    ("device", "row"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla V100-PCIE-16GB", None),
    ],
)
def test_a_card_has_the_row_of_its_own_name_or_none(device: str, row: str | None) -> None:
    found = hardware_of(device)
    assert (None if found is None else found.name) == row


def test_a_card_without_bf16_asks_for_fp16() -> None:
    with pytest.raises(ConfigError, match="give --fp16"):
        hardware_named("v100-32").peak("bf16")


def test_geforce_cards_sum_in_fp32_at_half_the_rate() -> None:
    """The same chip as a workstation card: rates by multiprocessor differ twofold, but for their clocks."""
    for geforce, workstation in (("rtx-3090", "a6000"), ("rtx-4090", "rtx-6000-ada")):
        rates = [HARDWARE[name].flops["bf16"] / HARDWARE[name].num_sms for name in (geforce, workstation)]
        assert rates[0] / rates[1] == pytest.approx(0.5, rel=0.1)

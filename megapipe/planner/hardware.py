"""Peak rates of devices, by the name the driver gives them. Used for MFU; where a device is not in the table MFU is not known.

Dense matrix rates without sparsity, from the makers' data sheets: NVIDIA A100 (2021), H100 SXM and H200 (2023), B200 (2024),
AMD MI300X (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device by configuration dtype; fp32 is absent: the matrix units know only TF32, which is not used."""

    bf16: float
    fp16: float

    def of(self, dtype: str) -> float | None:
        return {"bf16": self.bf16, "fp16": self.fp16}.get(dtype)


PEAKS: tuple[tuple[str, Peak], ...] = (  # part of the name, most specific first
    ("B200", Peak(2250 * TERA, 2250 * TERA)),
    ("H200", Peak(989 * TERA, 989 * TERA)),
    ("H100 PCIe", Peak(756 * TERA, 756 * TERA)),
    ("H100", Peak(989 * TERA, 989 * TERA)),
    ("A100", Peak(312 * TERA, 312 * TERA)),
    ("MI300X", Peak(1307 * TERA, 1307 * TERA)),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of the named device in the dtype; None where it is not in the table (CPUs, fp32, fp64)."""
    for part, peak in PEAKS:
        if part in device_name:
            return peak.of(dtype)
    return None

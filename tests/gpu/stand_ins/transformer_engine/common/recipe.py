"""fp8 recipes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    def delayed(self) -> bool:
        return True


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID

    def delayed(self) -> bool:
        return False


class Float8BlockScaling(Float8CurrentScaling): ...


class MXFP8BlockScaling(Float8CurrentScaling): ...

"""What every data set of this room is: a fixed number of samples, each seq_length + 1 tokens."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
TokenArray = NDArray[np.int64]


class TokenDataset(Protocol):
    """Sample i is an int64 array [seq_length + 1]: inputs are all but the last token, labels all but the first."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TokenArray: ...

    def grow(self, size: int) -> None:
        """Hold `size` samples, or as many as there are; those before stay what they are."""

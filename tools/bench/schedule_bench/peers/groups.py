"""Process groups of the peers: each has a separate one, with its connections and threads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def new_group(num_ranks: int, timeout_seconds: float) -> Any:
    """Return a gloo group of all ranks; called by all of them in one order."""
    return dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=timeout_seconds), backend="gloo")

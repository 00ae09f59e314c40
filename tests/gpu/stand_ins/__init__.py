"""Small stubs of libraries that need a GPU: the same package names and documented signatures, computed by torch.

They let the adapters in megapipe/gpu run on a CPU. `installed()` puts them on the path. test_signatures.py binds what
the adapters give them to the signatures of the libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = ("transformer_engine", "apex", "flash_attn", "fused_weight_gradient_mlp_cuda")


@contextmanager
def installed() -> Iterator[None]:
    """Make the stubs importable inside the block."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
            del sys.modules[name]

"""Imports for the server that ranks are forked from: torch, the test tools, all of megapipe.

Ranks then start without importing anything. A module that cannot be imported is skipped; the test that needs it shows
the error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

for _name in (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "pytest",
    "hypothesis",
):  # the first import of torch.optim imports _dynamo: 1 s
    importlib.import_module(_name)
for _path in sorted((REPOSITORY / "megapipe").rglob("*.py")):
    if _path.name not in ("__init__.py", "__main__.py"):
        with contextlib.suppress(Exception):
            importlib.import_module(".".join(_path.relative_to(REPOSITORY).with_suffix("").parts))
gc.collect()
# exclude the imports from garbage collection: a rank that collects between jobs then neither traverses nor copies them
gc.freeze()

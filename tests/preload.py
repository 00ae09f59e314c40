"""Imported once by the server that ranks are forked from, so that no rank pays for imports: torch, the test tools, all of megapipe.

A module that cannot be imported is left to the test that needs it, where the error is shown.
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
):  # the first torch.optim imports _dynamo: 1 s
    importlib.import_module(_name)
for _path in sorted((REPOSITORY / "megapipe").rglob("*.py")):
    if _path.name not in ("__init__.py", "__main__.py"):
        with contextlib.suppress(Exception):
            importlib.import_module(".".join(_path.relative_to(REPOSITORY).with_suffix("").parts))
gc.collect()
gc.freeze()  # what was imported is never collected: a rank that collects between jobs need not walk it, nor copy its pages

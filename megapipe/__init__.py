"""megapipe: pretraining of GPT models with tensor, pipeline and data parallelism, from a laptop CPU to a GPU cluster.

A run has three stages. The configuration (`config`) holds the options of the user. The plan (`plan`, with `topology`,
`layers`, `sharding` and `schedule`; no torch) computes the grid, the stages, the schedule and the memory of every rank.
`assembly` builds model, optimizer, pipeline and communicators from the plan, and `train` runs the steps.
`extras` holds the command line and the tools around training, such as conversion, inference, reports and verification.

The names of `megapipe.api` can be imported from here (docs/api.md); everything else is internal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megapipe.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a name of the public API when it is used: `import megapipe` is instant and imports no torch."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    return getattr(import_module("megapipe.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *import_module("megapipe.api").__all__]

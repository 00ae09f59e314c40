"""torch.compile for pointwise functions: one kernel for what would be a chain of them, each a read and a write of the activations.

Only what stands inside our hand-written Functions is compiled, never a graph with a linear in it: main gradients and the weight queue are
side effects that a compiled graph would lose. What is kept for the backward stays what it is without compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compiled(function: AnyFunction) -> AnyFunction:
    """`function` as one graph (fullgraph: a break would be an error), for the shapes it is called with."""
    return torch.compile(function, fullgraph=True, dynamic=False)  # type: ignore[return-value]

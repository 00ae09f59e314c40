"""Python's cycle collector, told to wait while a schedule is made, proven or simulated, or a CUDA graph recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def without_collector(make: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run `make` with the cycle collector off: a million new tuples that hold no cycle otherwise cost as much again in searching them."""

    @wraps(make)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not gc.isenabled():
            return make(*args, **kwargs)
        gc.disable()
        try:
            return make(*args, **kwargs)
        finally:
            gc.enable()

    return wrapped

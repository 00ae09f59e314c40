"""One mixture of experts of Hugging Face a file: a table of names and one of settings, as docs/conversion_family.md
explains.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megapipe.extras.convert.family import Family


def mixtures() -> tuple[Family, ...]:
    """Return the public families of all files here, in the order of the files' names."""
    names = sorted(module.name for module in iter_modules(__path__))
    public = (vars(import_module(f"{__name__}.{name}")).items() for name in names)
    return tuple(found for each in public for name, found in each if isinstance(found, Family) and name[0] != "_")

"""Every call of the adapters is one that the real libraries take: it is bound to signatures read from their sources.

The table (tools/write_library_signatures.py) has Transformer Engine 2.9 and 2.20, flash-attn 2.6.3, and apex at the
commit that it names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.config.training import OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.gpu.libraries import Apex, AttentionShape, FlashAttention, TransformerEngine
from megapipe.gpu.packed_attention import DocumentBorders
from tests.gpu.stand_ins import installed

TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("library_signatures.json").read_text()
)
VERSIONS = [(library, version) for library, versions in TABLE.items() for version in versions]
OLD = "pytorch.fp8_autocast"  # called only where there is no autocast


def signature_of(parameters: list[tuple[str, str, str | None]]) -> inspect.Signature:
    """Return a signature whose defaults are their source text."""
    made = [
        inspect.Parameter(
            name,
            inspect._ParameterKind[kind],
            default=inspect.Parameter.empty if default is None else default,
        )
        for name, kind, default in parameters
    ]
    return inspect.Signature(made)


def passed_on(table: dict[str, Any], name: str) -> list[Any]:
    """Return the parameters to which a class passes keyword arguments that are not its own."""
    return table.get(name.replace("__init__", "**kwargs"), []) if name.endswith("__init__") else []


Calls = dict[str, set[str]]  # name -> the keyword arguments that it was called with


def bound(function: Callable[..., Any], name: str, table: dict[str, Any], seen: Calls) -> Callable[..., Any]:
    """Wrap a function of a stub so that its arguments are first bound to the library's signature."""
    signature = signature_of(table[name])
    rest = passed_on(table, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if rest:
            signature_of(rest).bind(*args[:2], **arguments.get("kwargs", {}))
        seen.setdefault(name, set()).update(kwargs)
        return function(*args, **kwargs)

    return call


@contextmanager
def checked(library: str, version: str) -> Iterator[Calls]:
    """Install the stubs with checked calls; yields the names that have been called."""
    table = TABLE[library][version]
    seen: Calls = {}
    with installed():
        for name in table:
            if "**" in name or name == OLD:
                continue
            *place, attribute = name.split(".")
            owner: Any = importlib.import_module(library)
            for part in place:
                known = getattr(owner, part, None)
                owner = known if known is not None else importlib.import_module(f"{owner.__name__}.{part}")
            setattr(owner, attribute, bound(getattr(owner, attribute), name, table, seen))
        yield seen


def call_all(library: str) -> None:
    """Call everything that the adapter of a library calls."""
    shape, alone = AttentionShape(0, 2, 8, 0.5, 4, None, False), Group.alone("tp")
    weight = torch.nn.Parameter(torch.ones(8))
    qkv = [torch.randn(4, 1, 1, number, 8) for number in (2, 1, 1)]
    if library == "flash_attn":
        kernel, documents = FlashAttention().attention(shape), DocumentBorders(torch.tensor([0, 3, 4]).int(), 3)
        kernel(*qkv, None)
        kernel(*qkv, documents)
        return
    opened: Any
    if library == "apex":
        opened = Apex()
        opened.norm(torch.ones(2, 8), weight, None, 1e-5)
        opened.norm(torch.ones(2, 8), weight, weight, 1e-5)
    else:
        for recipe in ("delayed", "tensorwise"):
            opened = TransformerEngine("", "", PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe))
            with opened.region(alone):
                pass
        for norm in ("LayerNorm", "RMSNorm"):
            opened.norm(norm, 8, 1e-5, True)
        opened.attention(shape)(*qkv, None)
        linear = opened.linear(
            "column",
            8,
            8,
            bias=True,
            tp=alone,
            sequence_parallel=False,
            queue=None,
            splits_backward=True,
            uses_fp8=False,
        ).to_empty(device="cpu")
        linear(torch.ones(2, 1, 8, requires_grad=True)).sum().backward()
        linear.backward_dw()
    opened.adam([{"params": [weight]}], OptimizerConfig())


@pytest.mark.parametrize(("library", "version"), VERSIONS)
def test_the_libraries_take_what_the_adapters_give(library: str, version: str) -> None:
    with checked(library, version) as seen:
        call_all(library)
    assert set(seen) == {name for name in TABLE[library][version] if "**" not in name and name != OLD}


@pytest.mark.parametrize(("version", "takes_it"), [("2.9.0", False), ("2.20.2", True)])
def test_a_soft_cap_goes_to_versions_of_transformer_engine_that_have_it(
    version: str, takes_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, given = AttentionShape(0, 2, 8, 0.5, 4, 30.0, False), {}
    signature = signature_of(TABLE["transformer_engine"][version]["pytorch.DotProductAttention.__init__"])

    def build(*args: Any, **kwargs: Any) -> None:
        given.update(signature.bind(*args, **kwargs).arguments)

    build.__signature__ = signature  # type: ignore[attr-defined]
    with installed():
        pytorch = importlib.import_module("transformer_engine.pytorch")
        monkeypatch.setattr(pytorch.DotProductAttention, "__init__", build)
        attention = TransformerEngine("", "", PrecisionConfig()).attention
        if takes_it:
            attention(shape)
            assert given["softcap"] == 30.0
        else:
            with pytest.raises(ConfigError, match=r"Transformer Engine .*soft-cap.*2\.20"):
                attention(shape)


def test_a_soft_cap_needs_a_flash_attn_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(0, 2, 8, 0.5, 4, 30.0, False)
    with installed():
        library = importlib.import_module("flash_attn")
        FlashAttention().attention(shape)
        monkeypatch.setattr(library, "flash_attn_func", lambda q, k, v, dropout_p=0.0, causal=False: q)  # before 2.6
        with pytest.raises(ConfigError, match="has no soft-cap"):
            FlashAttention().attention(shape)


class Misspelt(TransformerEngine):
    """An adapter with a wrong argument in one call."""

    def linear(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        whole = self._linear_type
        self._linear_type = lambda *sizes, **options: whole(*sizes, delay_wgrad=True, **options)
        return super().linear(*args, **kwargs)


@pytest.mark.parametrize("version", TABLE["transformer_engine"])
def test_a_wrong_argument_of_an_adapter_is_found(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TransformerEngine", Misspelt)
    with checked("transformer_engine", version), pytest.raises(TypeError, match="'delay_wgrad'"):
        call_all("transformer_engine")


@pytest.mark.parametrize(
    ("library", "version"), [(library, version) for library, version in VERSIONS if library != "apex"]
)
def test_a_wrong_name_of_the_soft_cap_is_found(library: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.gpu.libraries.soft_cap", lambda *_: {"soft_cap": 1.0})
    with checked(library, version), pytest.raises(TypeError, match="'soft_cap'"):
        call_all(library)

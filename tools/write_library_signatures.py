#!/usr/bin/env python3
"""Write the signatures of the functions of optional libraries that megapipe calls, read from their sources.

    python tools/write_library_signatures.py NAME=VERSION=FOLDER ... > tests/gpu/library_signatures.json

NAME: transformer_engine, flash_attn or apex. FOLDER: an unpacked wheel, source distribution or checkout. VERSION: the
package's, or for apex, which is not on PyPI, the commit. No library is run, and the table holds no code: names,
kinds and defaults of parameters. tests/gpu/test_signatures.py binds megapipe's calls to it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

# library -> a line for each function: its name in the stand-ins of tests/gpu, its file, and `function`,
# `Class.function` or, of a dataclass, `Class.`
TABLE = {
    "transformer_engine": """
pytorch.Linear.__init__ pytorch/module/linear.py Linear.__init__
pytorch.Linear.forward pytorch/module/linear.py Linear.forward
pytorch.Linear.backward_dw pytorch/module/base.py TransformerEngineBaseModule.backward_dw
pytorch.LayerNorm.__init__ pytorch/module/layernorm.py LayerNorm.__init__
pytorch.LayerNorm.**kwargs pytorch/ops/basic/layer_norm.py LayerNorm.__init__
pytorch.RMSNorm.__init__ pytorch/module/rmsnorm.py RMSNorm.__init__
pytorch.RMSNorm.**kwargs pytorch/ops/basic/rmsnorm.py RMSNorm.__init__
pytorch.DotProductAttention.__init__ {attention} DotProductAttention.__init__
pytorch.DotProductAttention.forward {attention} DotProductAttention.forward
pytorch.autocast pytorch/quantization.py autocast
pytorch.fp8_autocast pytorch/quantization.py fp8_autocast
pytorch.optimizers.FusedAdam.__init__ pytorch/optimizers/fused_adam.py FusedAdam.__init__
common.recipe.DelayedScaling.__init__ common/recipe/__init__.py DelayedScaling.
common.recipe.Float8CurrentScaling.__init__ common/recipe/__init__.py Float8CurrentScaling.
""".format(attention="pytorch/attention/dot_product_attention/dot_product_attention.py"),
    "flash_attn": """
flash_attn_func flash_attn_interface.py flash_attn_func
flash_attn_varlen_func flash_attn_interface.py flash_attn_varlen_func
""",
    "apex": """
optimizers.FusedAdam.__init__ optimizers/fused_adam.py FusedAdam.__init__
normalization.fused_layer_norm.fused_layer_norm_affine normalization/fused_layer_norm.py fused_layer_norm_affine
normalization.fused_layer_norm.fused_rms_norm_affine normalization/fused_layer_norm.py fused_rms_norm_affine
""",
}
Parameter = tuple[str, str, str | None]  # name, kind as in inspect.Parameter, default as written


def of_function(function: ast.FunctionDef) -> list[Parameter]:
    """Return the parameters in order."""
    given, found = function.args, []
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        found.append((argument.arg, "POSITIONAL_OR_KEYWORD", default))
    if given.vararg is not None:
        found.append((given.vararg.arg, "VAR_POSITIONAL", None))
    found += [(a.arg, "KEYWORD_ONLY", default) for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg is not None:
        found.append((given.kwarg.arg, "VAR_KEYWORD", None))
    return [(name, kind, None if default is None else ast.unparse(default)) for name, kind, default in found]


def of_dataclass(made: ast.ClassDef) -> list[Parameter]:
    """Return the parameters of a dataclass, without those of its bases."""
    fields = [statement for statement in made.body if isinstance(statement, ast.AnnAssign)]
    found: list[Parameter] = [("self", "POSITIONAL_OR_KEYWORD", None)]
    for field in fields:
        default = None if field.value is None else ast.unparse(field.value)
        found.append((ast.unparse(field.target), "POSITIONAL_OR_KEYWORD", default))
    return found


def signature(path: Path, class_name: str, function_name: str) -> list[Parameter]:
    """Return the parameters of a function, a method, or (without a function's name) a dataclass."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    if class_name:
        (made,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
        if not function_name:
            return of_dataclass(made)
        body = made.body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function_name:
            return of_function(node)
        if isinstance(node, ast.ClassDef) and node.name == function_name:  # a context manager that is a class
            return signature(path, function_name, "__init__")[1:]
    raise SystemExit(f"{path} has no {class_name} {function_name}")


def main() -> None:
    table: dict[str, dict[str, dict[str, list[Parameter]]]] = {}
    for argument in sys.argv[1:]:
        library, version, folder = argument.split("=")
        found = table.setdefault(library, {})[version] = {}
        for line in TABLE[library].strip().splitlines():
            name, file, place = line.split()
            class_name, _, function_name = place.rpartition(".")
            found[name] = signature(Path(folder) / library / file, class_name, function_name)
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()

"""Import rules and other rules about the source code, checked on its syntax trees, including imports inside functions.

Every rule is also tested on a small violation, so that a check that detects nothing fails.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.tables import rows

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "megapipe"

SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["megapipe"]
LEVELS: dict[str, int] = SETTINGS["levels"]
TORCH_FREE: tuple[str, ...] = tuple(SETTINGS["torch_free"])
REFERENCE = "extras.reference"  # uses torch only; imported only by the packages that verify
REFERENCE_IS_SEEN_FROM = 9
# implementations that benchmarks compare with, which use torch.distributed directly
PEERS = tuple(REPOSITORY / "tools" / "bench" / name for name in ("schedule_bench/peers", "bench_megatron.py"))
USES_TORCH_DISTRIBUTED = {  # outside comm, and without a process group
    "megapipe.extras.launch.torchrun": "starts torchrun",
    "megapipe.extras.convert.dcp_files": "writes files of torch.distributed.checkpoint in one process",
}
TORCH_FAMILY = ("torch", "torchvision", "transformers", "accelerate")  # each imports torch
LIBRARIES = {  # each is imported in one file, inside functions, so that only runs that selected it import it
    "transformer_engine": "megapipe.gpu.libraries",
    "apex": "megapipe.gpu.libraries",
    "fused_weight_gradient_mlp_cuda": "megapipe.gpu.libraries",
    "flash_attn": "megapipe.gpu.libraries",
}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
LIVE_STATE = {
    "Group",
    "ProcessGroups",
    "build_process_groups",
    "new_group",
    "Config",
    "Topology",
    "Tracer",
    "World",
    "Environment",
}
UNPICKLERS = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
READS_PICKLES = {  # readers of foreign checkpoints that call nothing (tests/extras/convert/test_crafted_pickles.py)
    "megapipe.extras.convert.pickled",
}
RUNS_TEXT = (
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "yaml.load",
    "yaml.unsafe_load",
)
LOADS = ("pickle.load", "pickle.loads", "np.load", "numpy.load", "torch.load")
LAST_WORDS = {name.rpartition(".")[2] for name in (*RUNS_TEXT, *LOADS)}
MUTATORS = {
    "append",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "extend",
    "insert",
    "remove",
    "discard",
    "appendleft",
}


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module in the package, by dotted name."""
    return {dotted_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def dotted_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the package of a module.

    'comm' for megapipe.comm.groups, 'extras.cli' for megapipe.extras.cli.plan, '' for megapipe itself.
    """
    words = [*module.split("."), "", ""]
    return words[1] if words[1] != "extras" else ".".join(words[1:3]) if words[2] else ""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree: walking it again for each rule takes most of the time."""
    return tuple(ast.walk(tree))


def imports_of(tree: ast.Module, module: str, is_package: bool = False) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield (line, imported module, imported names) of all imports.

    Imports in functions, under TYPE_CHECKING and through importlib are included.
    """
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".") if is_package else module.split(".")[:-1]
            prefix = base[: len(base) - node.level + 1] if node.level else []
            yield (
                node.lineno,
                ".".join([*prefix, *([node.module] if node.module else [])]),
                tuple(alias.name for alias in node.names),
            )
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, node.args[0].value, ()


def modules_imported(tree: ast.Module, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of all imports.

    `from megapipe import topology` and `from megapipe.comm import groups` are resolved to modules.
    """
    for line, name, taken in imports_of(tree, module, is_package):
        submodules = [f"{name}.{word}" for word in taken if f"{name}.{word}" in modules() or name == "megapipe"]
        yield from ((line, submodule) for submodule in submodules)
        if not submodules or len(submodules) < len(taken):
            yield line, name


def violations_of_levels(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    package = package_of(module)
    violations = []
    for line, name in modules_imported(tree, module, is_package):
        target = package_of(name)
        if (
            name.split(".")[0] != "megapipe"
            or target in (package, "", "__version__")
            or (target == "errors" and package != REFERENCE)
        ):
            continue
        if target == REFERENCE:
            allowed = LEVELS.get(package, 0) >= REFERENCE_IS_SEEN_FROM
        else:
            allowed = package != REFERENCE and target in LEVELS and LEVELS[target] < LEVELS[package]
        if not allowed:
            violations.append(
                f"{module}:{line} (level {LEVELS.get(package, 'none')}) imports {name} (level "
                f"{LEVELS.get(target, 'none')})"
            )
    return violations


def violations_of_torch(tree: ast.Module, module: str) -> list[str]:
    return [
        f"{module}:{line} imports {name}"
        for line, name, _ in imports_of(tree, module)
        if name.split(".")[0] in TORCH_FAMILY
    ]


def violations_of_one_place(tree: ast.Module, module: str) -> list[str]:
    """Find uses of torch.distributed: imports and attribute accesses."""
    lines = [
        line
        for line, name, taken in imports_of(tree, module)
        if name.startswith("torch.distributed") or (name == "torch" and "distributed" in taken)
    ]
    lines += [
        node.lineno
        for node in nodes_of(tree)
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node) == "torch.distributed"
    ]
    return [f"{module}:{line} uses torch.distributed" for line in lines]


def violations_of_libraries(tree: ast.Module, module: str) -> list[str]:
    """Find imports of an optional library outside its file, or outside functions in that file."""
    functions = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)]
    return [
        f"{module}:{line} imports {name}"
        for line, name, _ in imports_of(tree, module)
        if (file := LIBRARIES.get(name.split(".")[0])) is not None
        and (module != file or not any(each.lineno <= line <= (each.end_lineno or 0) for each in functions))
    ]


def violations_of_environment(tree: ast.Module, module: str) -> list[str]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}  # of os
    lines = [
        node.lineno
        for node in nodes_of(tree)
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
    ]
    lines += [line for line, name, taken in imports_of(tree, module) if name == "os" and set(taken) & names]
    return [f"{module}:{line} reads the environment" for line in lines]


def violations_of_code_execution(tree: ast.Module, module: str) -> list[str]:
    """Find unsafe calls: pickle outside the restricted readers, shells, eval, and torch's object collectives.

    Object collectives unpickle the data that they receive.
    """
    violations = [
        f"{module}:{line} imports {name}"
        for line, name, _ in imports_of(tree, module)
        if name.split(".")[0] in UNPICKLERS and module not in READS_PICKLES
    ]
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            if word.endswith(("_object_list", "_object")) and ast.unparse(node).startswith(
                ("dist.", "torch.", "distributed")
            ):
                violations.append(f"{module}:{node.lineno} uses {word}, which unpickles received data")
            text = ast.unparse(node) if word in LAST_WORDS else ""
            if text in RUNS_TEXT:
                violations.append(f"{module}:{node.lineno} uses {text}")
            if text in LOADS:
                violations += _violations_of_loading(tree, node, module)
        if isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            violations.append(f"{module}:{node.value.lineno} starts a shell")
    return violations


def _violations_of_loading(tree: ast.Module, function: ast.Attribute | ast.Name, module: str) -> list[str]:
    """Require that every use is a call which disables pickles or loads only weights."""
    says = {
        "torch.load": ("weights_only", "True"),
        "np.load": ("allow_pickle", "False"),
        "numpy.load": ("allow_pickle", "False"),
    }
    wanted = says.get(ast.unparse(function))
    calls = [node for node in nodes_of(tree) if isinstance(node, ast.Call) and node.func is function]
    if any((keyword.arg, ast.unparse(keyword.value)) == wanted for call in calls for keyword in call.keywords):
        return []
    return [
        f"{module}:{function.lineno} uses {ast.unparse(function)}" + (f" without {'='.join(wanted)}" if wanted else "")
    ]


def violations_of_state(tree: ast.Module, module: str) -> list[str]:
    """Find live objects created at import, `global` statements, and module-level containers that functions change."""
    violations = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Call):
            called = ast.unparse(statement.value.func).split(".")
            if set(called) & LIVE_STATE:
                violations.append(f"{module}:{statement.lineno} makes a {'.'.join(called)} at import")
    held = {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }
    for function in nodes_of(tree):
        if isinstance(function, ast.Global):
            violations.append(f"{module}:{function.lineno} declares global {', '.join(function.names)}")
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            violations += [
                f"line {line} changes {name} of {module}" for line, name in changed_names(function) if name in held
            ]
    return sorted(set(violations))


def changed_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of containers that a function changes in place without binding them."""
    arguments = function.args
    own = {
        a.arg
        for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        if a
    }
    own |= {node.id for node in nodes_of(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes_of(function):
        target: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        if isinstance(target, ast.Name) and target.id not in own:
            yield target.lineno, target.id


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return one import cycle with its first module repeated at the end, or an empty list."""
    done: set[str] = set()
    for start in graph:
        trail: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = [("", iter([start]))]
        while stack:
            for module in stack[-1][1]:
                if module in trail:
                    return [*trail[trail.index(module) :], module]
                if module not in done and module in graph:
                    trail.append(module)
                    stack.append((module, iter(sorted(graph[module]))))
                    break
            else:
                finished, _ = stack.pop()
                if finished:
                    trail.pop()
                    done.add(finished)
    return []


def scripts() -> list[Path]:
    """Return the scripts outside the package."""
    return [
        path
        for path in (REPOSITORY / "pretrain_gpt.py", *sorted((REPOSITORY / "tools").rglob("*.py")))
        if path.exists()
    ]


def test_every_package_has_a_level() -> None:
    packages = {package_of(module) for module in modules()} - {"", REFERENCE}
    assert packages <= set(LEVELS), f"give {sorted(packages - set(LEVELS))} a level in LEVELS"


def test_imports_go_only_to_lower_levels() -> None:
    found = [
        violation
        for module, path in modules().items()
        if module != "megapipe"
        for violation in levels_of_file(module, path)
    ]
    assert not found, "\n".join(found)


def levels_of_file(module: str, path: Path) -> list[str]:
    return violations_of_levels(tree_of(path), module, path.name == "__init__.py")


def test_modules_import_without_cycles() -> None:
    graph = {
        module: {
            name for _, name in modules_imported(tree_of(path), module, path.name == "__init__.py") if name in modules()
        }
        - {module}
        for module, path in modules().items()
    }
    assert cycle_in(graph) == []


def test_plan_half_names_no_torch() -> None:
    found = [
        b
        for module, path in modules().items()
        if package_of(module) in TORCH_FREE
        for b in violations_of_torch(tree_of(path), module)
    ]
    assert not found, "\n".join(found)


def test_importing_the_plan_half_leaves_torch_out() -> None:
    """Import these packages in a fresh interpreter, which covers third-party packages too."""
    plan = [module for module in modules() if package_of(module) in ("", *TORCH_FREE)]
    code = (
        "import importlib, sys\n"
        f"for name in {plan!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' brings torch'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr


def test_torch_distributed_is_used_only_in_comm() -> None:
    found = [
        b
        for module, path in modules().items()
        if package_of(module) != "comm" and module not in USES_TORCH_DISTRIBUTED
        for b in violations_of_one_place(tree_of(path), module)
    ]
    found += [
        b
        for path in scripts()
        if not {path, *path.parents} & set(PEERS)
        for b in violations_of_one_place(tree_of(path), dotted_name(path))
    ]
    assert not found, "\n".join(found)


def test_chosen_libraries_are_imported_in_one_file_each() -> None:
    found = [b for module, path in modules().items() for b in violations_of_libraries(tree_of(path), module)]
    assert not found, "\n".join(found)


def test_environment_is_read_in_one_file() -> None:
    found = [
        b
        for module, path in modules().items()
        if module != "megapipe.environment"
        for b in violations_of_environment(tree_of(path), module)
    ]
    found += [b for path in scripts() for b in violations_of_environment(tree_of(path), dotted_name(path))]
    assert not found, "\n".join(found)


def test_no_live_state_in_module_globals() -> None:
    found = [
        violation for module, path in modules().items() for violation in violations_of_state(tree_of(path), module)
    ]
    assert not found, "\n".join(found)


def test_received_data_is_never_unpickled_or_executed() -> None:
    found = [b for module, path in modules().items() for b in violations_of_code_execution(tree_of(path), module)]
    found += [
        b
        for path in scripts()
        for b in violations_of_code_execution(tree_of(path), dotted_name(path))
        if not {path, *path.parents} & set(PEERS)
    ]
    assert not found, "\n".join(found)


def test_reference_imports_torch_alone() -> None:
    allowed = {"torch", "__future__", *sys.stdlib_module_names}
    found = [
        f"{module}:{line} imports {name}"
        for module, path in modules().items()
        if package_of(module) == REFERENCE
        for line, name, _ in imports_of(tree_of(path), module, path.name == "__init__.py")
        if name.split(".")[0] not in allowed and not name.startswith(f"megapipe.{REFERENCE}")
    ]
    assert not found, "\n".join(found)


def test_packages_are_introduced_by_a_docstring_and_re_export_nothing() -> None:
    for module, path in modules().items():
        assert ast.get_docstring(tree_of(path)), f"{module} has no docstring"
        if path.name == "__init__.py" and module != "megapipe":
            assert not list(imports_of(tree_of(path), module, True)), f"{module} imports in its __init__.py"


def test_no_file_has_a_generic_name() -> None:
    names = {
        path: set(path.relative_to(REPOSITORY).with_suffix("").parts) for path in (*modules().values(), *scripts())
    }
    assert not [path for path, parts in names.items() if parts & NAMES_THAT_SAY_NOTHING]


PLANTED = rows(REPOSITORY / "tests" / "planted.tsv")


@pytest.mark.parametrize(
    ("rule", "module", "verdict", "source"), PLANTED, ids=[f"{row[0]}: {row[3]}" for row in PLANTED]
)
def test_planted_violations_are_seen(rule: str, module: str, verdict: str, source: str) -> None:
    found = globals()[f"violations_of_{rule}"](ast.parse(source.replace("\\n", "\n")), module)
    assert bool(found) == (verdict == "wrong"), found


def test_planted_circle_is_seen() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []

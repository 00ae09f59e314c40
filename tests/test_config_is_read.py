"""Every configuration field is read somewhere outside megapipe.config, so no setting is ignored.

A read is recognized by syntax alone: an attribute access `x.name` whose x ends in the section
(`plan.config.training.seed`, `config.training`), in a name that the same file annotates with the section's class
(`training: TrainingConfig`), or in a name assigned from such an expression (`flags = config.checkpoint`). Names are not
followed between files or scopes. A read can therefore be missed (then write it more plainly), and a false one arises
only if one name is used for two sections with a field of the same name. tests/test_flag_effects.py checks that each
field also has an effect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.config.config import all_fields, section_types
from megapipe.config.layers import EXPERT_LAYERS, MARKS

REPOSITORY = Path(__file__).resolve().parent.parent
SECTION_OF_CLASS = {
    f"{prefix}{section_type.__name__}": section
    for section, section_type in section_types().items()
    for prefix in ("", "Resolved")
}


def reads_of(source: str) -> set[tuple[str, str]]:
    """Return the (section, field) pairs that a file reads."""
    tree = ast.parse(source)
    stands_for: dict[str, set[str]] = {section: {section} for section in section_types()}
    for name, section in annotated(tree):
        stands_for.setdefault(name, set()).add(section)
    for name, value in assigned(tree):
        for section in stands_for.get(last_name(value), ()) if isinstance(value, ast.Attribute | ast.Name) else ():
            stands_for.setdefault(name, set()).add(section)
    return {
        (section, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for section in stands_for.get(last_name(node.value), ())
    }


def annotated(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name, section) of arguments and variables whose annotation is a section's class."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.arg)
            and isinstance(node.annotation, ast.Name)
            and node.annotation.id in SECTION_OF_CLASS
        ):
            yield node.arg, SECTION_OF_CLASS[node.annotation.id]
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.annotation, ast.Name)
            and node.annotation.id in SECTION_OF_CLASS
        ):
            yield last_name(node.target), SECTION_OF_CLASS[node.annotation.id]


def assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of every assignment; tuples are unpacked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from (
                        (last_name(name), value) for name, value in zip(target.elts, node.value.elts, strict=False)
                    )
                else:
                    yield last_name(target), node.value


def last_name(node: ast.AST) -> str:
    """Return 'training' for `plan.config.training`, and '' for an expression that is not a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_every_field_is_read_outside_the_configuration() -> None:
    # what layers have in place of the model's options is read in `config.layers`, and that elsewhere
    found: set[tuple[str, str]] = {("model", name) for name in (*MARKS, EXPERT_LAYERS, "layer_pattern")}
    # by rules, `resolve_model`, and properties of the section
    found |= {
        ("optimizer", "optimizer_options"),
        ("optimizer", "muon_tp_mode"),
        ("model", "make_vocab_size_divisible_by"),
    }
    found |= {("model", "moe_router_load_balancing_type"), ("model", "moe_aux_loss_coeff")}
    for path in (REPOSITORY / "megapipe").rglob("*.py"):
        if "config" not in path.relative_to(REPOSITORY / "megapipe").parts[:1]:
            found |= reads_of(path.read_text(encoding="utf-8"))
    assert [field.key for field in all_fields() if (field.section, field.name) not in found] == []


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("x = plan.config.training.seed", {("training", "seed")}),
        ("def f(training: TrainingConfig): return training.seed", {("training", "seed")}),
        ("flags = config.checkpoint\nprint(flags.save)", {("checkpoint", "save")}),
        ("model, tp = self.config.model, 2\nreturn_ = model.num_layers", {("model", "num_layers")}),
        ("other.seed", set()),
        ("training.seed = 1", set()),
        ("replace(training, seed=1)", set()),
    ],
    ids=["whole path", "annotated", "assigned", "tuple", "another object", "written", "keyword"],
)
def test_what_counts_as_a_read(source: str, reads: set[tuple[str, str]]) -> None:
    assert {read for read in reads_of(source) if read[1] not in section_types()} - {("training", "training")} == reads

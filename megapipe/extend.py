"""The interface for extensions: what adds schedules, norms, activations, kinds of attention, token mixers, update
rules, tokenizers, data sets and loggers to megapipe, without a fork.

A file that calls these functions at its top level is an extension; `--extension FILE.py` loads it, and an installed
package with an entry point in the group `megapipe.extensions` is found by the names that it adds. Each function
registers what follows it under a name, which the option for names of its kind then takes. docs/extend.md has a
complete example of each. Families of checkpoints to convert: `megapipe.extras.convert.extend`.

None of this imports torch: functions of an extension may import it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from megapipe.config.config import Config
from megapipe.config.files import DATASETS, LOGGERS, TOKENIZER_TYPES, DatasetKind, TokenizerKind
from megapipe.config.model import (
    ACTIVATIONS,
    ATTENTIONS,
    NORMALIZATIONS,
    ActivationKind,
    AttentionHeads,
    AttentionKind,
    MixerKind,
    NormKind,
)
from megapipe.config.training import ADAM_STATES, OPTIMIZERS, UpdateKind, UpdateStep
from megapipe.data.registered import DatasetPart, RegisteredDataset
from megapipe.errors import ConfigError, ScheduleError
from megapipe.registry import Registry
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.families import SCHEDULES, ScheduleFamily, build_lowered, build_stream
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape
from megapipe.schedule.schedule import Row
from megapipe.sharding.state_dtypes import MASTER

__all__ = [
    "Action",
    "AttentionHeads",
    "Config",
    "DatasetPart",
    "Op",
    "Placement",
    "Row",
    "Shape",
    "UpdateStep",
    "linear",
    "loop",
    "register_activation",
    "register_attention",
    "register_dataset",
    "register_logger",
    "register_matrix_rule",
    "register_mixer",
    "register_norm",
    "register_schedule",
    "register_tokenizer",
    "register_update_rule",
    "two_directions",
    "v_shape",
]

Function = TypeVar("Function", bound=Callable[..., Any])
# (ranks, microbatches) on which a schedule is proven when it is registered
PROVEN = ((2, 1), (2, 4), (3, 7), (4, 4), (4, 9))
RESERVED_STATES = (MASTER, "weights")  # keys of checkpoints


def _registration(
    registry: Registry[Any], name: str, row: Callable[[Callable[..., Any]], Any]
) -> Callable[[Function], Function]:
    """Return the decorator that adds the row of a function to a registry."""

    def register(function: Function) -> Function:
        registry.add(name, row(function))
        return function

    return register


def register_schedule(name: str, summary: str, **properties: Any) -> Callable[[Function], Function]:
    """Register a function Shape -> rows of actions, one row for each pipeline rank, as --pipeline-schedule `name`.

    The actions are F and B, or with splits_backward I and W; messages and reductions are added by megapipe. summary: a
    line for `megapipe schedule --help`. properties: other fields of `ScheduleFamily`, such as placement=v_shape,
    takes_chunks=True, splits_backward=True. The schedule is proven complete and free of deadlocks for some sizes here,
    and in each run for its own size. Raises ScheduleError, with the grid and the action at fault.
    """

    def register(function: Function) -> Function:
        def generate(shape: Shape) -> tuple[Row, ...]:
            return _rows(function, name, shape)

        try:
            family = ScheduleFamily(name, generate, summary, **properties)
        except TypeError as error:
            raise ConfigError(f"schedule {name!r}: {error}") from None
        SCHEDULES.add(name, family)
        _prove(family)
        return function

    return register


def _rows(function: Callable[..., Any], name: str, shape: Shape) -> tuple[Row, ...]:
    """Return the rows that a function generates. Raises ScheduleError if it fails or returns something else."""
    size = f"schedule {name!r} on {shape.num_ranks} ranks with {shape.num_microbatches} microbatches"
    try:
        rows = tuple(tuple(row) for row in function(shape))
    except Exception as error:
        raise ScheduleError(f"{size}: {type(error).__name__}: {error}") from None
    wrong = [action for row in rows for action in row if not isinstance(action, Action)]
    if wrong:
        raise ScheduleError(f"{size}: a row holds {wrong[0]!r}; expected Action(stage, Op.F, microbatch)")
    return rows


def _prove(family: ScheduleFamily) -> None:
    """Prove a schedule for some sizes.

    Raises ScheduleError, also where properties do not fit the rows, or none of the sizes can run.
    """
    for ranks, microbatches, slices in _sizes(family):
        schedule = build_lowered(family.name, ranks, family.num_chunks(2), microbatches, num_slices=slices)
        found = bool(schedule.ops & {Op.I, Op.W})
        if found != family.splits_backward:
            rows = "I and W" if found else "no I and W"
            raise ScheduleError(f"schedule {family.name!r} has {rows}: register it with splits_backward={found}")
        if not schedule.is_synchronous and family.versions is None:
            raise ScheduleError(f"schedule {family.name!r} has UPDATE, so it must be registered with its versions")
        if not schedule.is_synchronous and microbatches >= ranks:
            build_stream(family.name, ranks, microbatches)


def _sizes(family: ScheduleFamily) -> tuple[tuple[int, int, int], ...]:
    """Return (ranks, microbatches, slices) near those of PROVEN that a family takes. Raises ScheduleError if none."""
    found = []
    for ranks, microbatches in PROVEN:
        try:
            problem, near = family.counts(ranks, microbatches) if family.counts else ("", ())
        except ConfigError:  # so many ranks cannot run it
            continue
        if ranks % 2 == 0 or not family.is_mirrored(ranks):
            found += [
                (ranks, near[-1] if problem else microbatches, s) for s in ((1, 2) if family.takes_slices else (1,))
            ]
    if not found:
        numbers = ", ".join(sorted({str(ranks) for ranks, _ in PROVEN}))
        raise ScheduleError(f"schedule {family.name!r} runs on none of {numbers} ranks, so that it cannot be proven")
    return tuple(dict.fromkeys(found))


def register_norm(name: str, *, has_bias: bool = False) -> Callable[[Function], Function]:
    """Register a function (x, weight, bias, epsilon) -> x's shape as --normalization `name`.

    x: [..., size]; weight: [size], 1 at the start, 1 + weight with --apply-layernorm-1p; bias: [size], or None without
    has_bias. All are in at least fp32, and the result is rounded to the model's dtype. Only x is kept for the backward,
    which runs the function again.
    """

    return _registration(NORMALIZATIONS, name, lambda function: NormKind(0, has_bias, function))


def register_activation(name: str, *, is_gated: bool = False) -> Callable[[Function], Function]:
    """Register a function x -> y of tensors as --activation `name`, elementwise.

    x: [..., F], or with is_gated [..., 2 F], the halves gate and up of a linear twice as wide; y: [..., F], all in the
    model's dtype. Only x is kept for the backward, which runs the function again.
    """

    return _registration(ACTIVATIONS, name, lambda function: ActivationKind(is_gated, function=function))


def register_attention(name: str) -> Callable[[Function], Function]:
    """Register a function (q, k, v, mask, heads) -> output as --attention-kind `name`.

    q, output: [batch, heads, s, d] with the heads of this tensor-parallel rank; k, v: [batch, heads, keys, d]; mask: to
    add to scores, 0 or -infinity, [1 or batch, 1, s, keys] in q's dtype; heads: `AttentionHeads`, with the scale of the
    scores and the global numbers of the heads. Only q, k and v are kept for the backward, which runs the function
    again.
    """

    return _registration(ATTENTIONS, name, lambda function: AttentionKind(function))


def register_mixer(
    name: str,
    *,
    reference: Callable[..., Any],
    options: Mapping[str, float] | None = None,
    check: Callable[..., Iterable[str]] = lambda config, layer, options: (),
) -> Callable[[Function], Function]:
    """Register a subclass of `megapipe.model.mixer.Mixer` as --attention-kind `name`: a token mixer with linears and
    parameters of its own, in the place of a layer's attention.

    reference: (hidden size, has biases, options) -> a module of plain PyTorch from [b, s, h] to [b, s, h], on one
    process, whose parameters have the names and shapes of the whole mixer; --verify-grid compares with it. options:
    names with defaults, which --attention-options NAME=NUMBER replaces. check: (Config, the layer's model section,
    options) -> error messages for configurations that the mixer cannot run.
    """

    def kind_of(mixer: Callable[..., Any]) -> AttentionKind:
        missing = [method for method in ("declare", "mix") if not callable(getattr(mixer, method, None))]
        if missing:
            raise ConfigError(f"token mixer {name!r} has no {missing[0]}: register a subclass of Mixer")
        return AttentionKind(mixer=MixerKind(mixer, reference, dict(options or {}), check))

    return _registration(ATTENTIONS, name, kind_of)


def register_update_rule(
    name: str, *, states: Sequence[str] = (), options: Mapping[str, float] | None = None, temporaries: int = 3
) -> Callable[[Function], Function]:
    """Register a function (weights, gradient, states, step) -> None as --optimizer `name`.

    It updates weights and states in place and leaves the gradient as it is: flat tensors in at least fp32, parts of a
    parameter. It must be elementwise. states: the names of the tensors that are kept for each parameter, zeros at the
    start; they are sharded, saved and planned like Adam's moments. step: `UpdateStep`. options: names with defaults,
    which --optimizer-options NAME=NUMBER replaces; found in step.options. temporaries: tensors of the weights' size
    that an update makes at the same time, for the planned memory.
    """

    names = (states,) if isinstance(states, str) else tuple(states)
    for state in names:
        if not str(state).isidentifier() or state in RESERVED_STATES or names.count(state) > 1:
            raise ConfigError(f"update rule {name!r}: {state!r} cannot name a state, or names two")
    if isinstance(temporaries, bool) or not isinstance(temporaries, int | float) or not 0 <= temporaries < 1000:
        expected = f"expected a number of tensors of at least 0, got {temporaries!r}"
        raise ConfigError(f"update rule {name!r}: {expected}")
    kind = UpdateKind(names, dict(options or {}), int(temporaries))
    return _registration(OPTIMIZERS, name, lambda function: replace(kind, update=function))


def register_matrix_rule(name: str, *, options: Mapping[str, float] | None = None) -> Callable[[Function], Function]:
    """Register a function (momentum, step) -> update as --optimizer `name`, over the matrices of hidden layers.

    It gets the momentum of one whole matrix, [outputs, inputs] in at least fp32, on one rank, and returns the tensor
    that the learning rate multiplies: q, k and v of attention, gate and up of an MLP and every expert come apart.
    Weights decay as with AdamW, which updates all other parameters. The momentum is a running mean of the gradient:
    the option `momentum`, 0.9 unless `options` gives another, is its decay. step: `UpdateStep`. options: names with
    defaults, as in `register_update_rule`.
    """

    kind = UpdateKind(ADAM_STATES, {"momentum": 0.9, **(options or {})}, matrix_states=("momentum",))
    return _registration(OPTIMIZERS, name, lambda function: replace(kind, direction=function))


def register_tokenizer(name: str, *, needs_model: bool = False) -> Callable[[Function], Function]:
    """Register a function --tokenizer-model -> tokenizer (or a class) as --tokenizer-type `name`.

    It is called with the path, or with None. The tokenizer has vocab_size, encode(text) -> ids and decode(ids) -> text;
    optionally eod, bos and pad, ids or None, and save(folder), which writes the files that the path of a folder can
    name later. needs_model: --tokenizer-model must be given.
    """

    needs = ("tokenizer_model",) if needs_model else ()
    return _registration(TOKENIZER_TYPES, name, lambda function: TokenizerKind(needs, function, or_model=True))


def register_dataset(name: str, *, shuffle: bool = True, has_loss_mask: bool = False) -> Callable[[Function], Function]:
    """Register a function DatasetPart -> data set (or a class) as --dataset `name`.

    The data set has a length and sample(index) -> the seq_length + 1 token ids of a sample, always the same for the
    same index, on every rank; with has_loss_mask the pair of them and of as many numbers, 1 where the token is trained
    and 0 where it is in no loss. It may have `fingerprint`, a text that changes with the data; a run resumes only with
    the same. Samples come in the order of a permutation drawn from --seed, a new one in each epoch; shuffle=False:
    in their own order.
    """

    def kind_of(function: Callable[..., Any]) -> DatasetKind:
        return DatasetKind(lambda part: RegisteredDataset(name, part, function, shuffle, has_loss_mask), has_loss_mask)

    return _registration(DATASETS, name, kind_of)


def register_logger(name: str) -> Callable[[Function], Function]:
    """Register a function Config -> logger (or a class) as --logger `name`.

    It is called on rank 0 when the run starts. The logger has log(step, metrics), metrics by name such as train/loss
    (those that TensorBoard gets), and optionally close(). A logger that fails is left out from then on.
    """

    return _registration(LOGGERS, name, lambda function: function)

"""Keys of config.json in which layers may differ: sliding windows and rotary positions, of all layers or by layer type.

transformers 4 has `rope_theta` and `rope_scaling`, 5 has `rope_parameters`, with one entry for each layer type where
types differ. Both are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from megapipe.config.layer_pattern import REPEAT
from megapipe.config.layers import LayerConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.tables import Layers, Rule, Settings, again, check_alike, stated

THETA, SCALING, PARAMETERS, PARTIAL = "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"
LENGTH = "original_max_position_embeddings"
# key of rotary positions -> (our field, default or None: required)
ROPE_KEYS: dict[str, tuple[str, float | None]] = {
    "factor": ("rope_scaling_factor", None),
    "low_freq_factor": ("rope_low_freq_factor", None),
    "high_freq_factor": ("rope_high_freq_factor", None),
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
    "mscale": ("yarn_mscale", 1.0),
    "mscale_all_dim": ("yarn_mscale_all_dim", 0.0),
    LENGTH: ("rope_original_max_position_embeddings", None),
}
ROPE_TYPES = {  # their rope_type, which is ours but for default, our none -> its keys
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", LENGTH),
}


# ------------------------------------------------------------------------------------------- rotary positions


def rope_fields(
    parameters: Mapping[str, Any],
    base: float,
    settings: Settings,
    part: float | None = None,
    base_key: str | None = THETA,
    kinds: Sequence[str] = tuple(ROPE_TYPES),
) -> dict[str, Any]:
    """Return our fields of an entry of rope_parameters, or of rope_scaling.

    base, part: where the entry has none; part: the rotated part of a head, None where whole heads are rotated.
    base_key: another key that states the base, too. kinds: the values that rope_type may have.
    """
    scaling = dict(parameters)
    for name, beside in ((THETA, base_key), (PARTIAL, PARTIAL)):
        outside = None if beside is None else settings.get(beside)
        check_alike({str(beside): outside, f"{name} of the rotary parameters": scaling.get(name)})
    check_alike({name: scaling.get(name) for name in ("rope_type", "type")})
    base = scaling.pop(THETA, None) or base
    partial = scaling.pop(PARTIAL, None) or settings.get(PARTIAL) or part or 1.0
    if part is None and partial != 1.0:
        raise ConfigError(f"{PARTIAL} {partial} cannot be expressed: this architecture rotates whole heads")
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    scaling.pop("type", None)
    if kind not in kinds:
        raise ConfigError(f"rope_type {kind!r} cannot be expressed; it can be {', '.join(kinds)}")
    ours = "none" if kind == "default" else kind
    fields = {"position_embedding_type": "rope", "rotary_base": float(base), "rope_scaling_type": ours}
    fields |= {} if part is None else {"rotary_percent": float(partial)}
    if kind == "yarn":  # keys that state what is always so here
        scaling.setdefault(LENGTH, settings.get("max_position_embeddings"))
        fields["yarn_correction_range_round_to_int"] = bool(scaling.pop("truncate", True))
        given = scaling.pop("attention_factor", None)
        if given is not None:
            here = 0.1 * math.log(scaling["factor"]) + 1.0
            if scaling.get("mscale") or scaling.get("mscale_all_dim") or not math.isclose(given, here, rel_tol=1e-9):
                rule = f"it is 0.1 ln(factor) + 1 = {here}"
                raise ConfigError(f"rope_type yarn: attention_factor {given} cannot be expressed: {rule}")
    for name in ROPE_TYPES[kind]:
        field, default = ROPE_KEYS[name]
        if (value := stated(scaling, name, default)) is None:
            raise ConfigError(f"rope_type {kind}: the key {name} is missing")
        scaling.pop(name, None)
        fields[field] = int(value) if name == LENGTH else float(value)
    if scaling:
        raise ConfigError(f"rope_type {kind}: the key {next(iter(scaling))} cannot be expressed")
    return fields


def one_of_both(stated: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return our fields, read from rope_scaling and from rope_parameters. Raises ConfigError if these differ:
    transformers takes the former.
    """
    first, *others = stated
    for name in (
        name for other in others for name in first.keys() | other.keys() if first.get(name) != other.get(name)
    ):
        values = ", ".join(str(one.get(name)) for one in stated)
        raise ConfigError(f"{SCALING} and {PARAMETERS} contradict each other ({name} {values}); remove one of the two")
    return first


def rope_scaling(layer: LayerConfig) -> dict[str, Any] | None:
    """Return rope_scaling of a layer, None without scaling."""
    if layer.rope_scaling_type == "none":
        return None
    scaling = {name: getattr(layer, ROPE_KEYS[name][0]) for name in ROPE_TYPES[layer.rope_scaling_type]}
    if layer.rope_scaling_type == "yarn" and not layer.yarn_mscale_all_dim:  # transformers takes both or neither
        del scaling["mscale"], scaling["mscale_all_dim"]
    if layer.rope_scaling_type == "yarn" and not layer.yarn_correction_range_round_to_int:
        scaling["truncate"] = False
    return {"rope_type": layer.rope_scaling_type, **scaling}


def rope(
    base: float = 10000.0,
    part: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    kinds: Sequence[str] = tuple(ROPE_TYPES),
) -> Rule:
    """Return the rule of rotary positions that are the same in all layers. It writes keys as in transformers 4, which
    both versions read.

    base, part, scaling: defaults; the first two, and kinds, as in rope_fields.
    """

    def read(settings: Settings) -> dict[str, Any]:
        theta = settings.get(THETA) or base
        given = [settings[name] for name in (SCALING, PARAMETERS) if settings.get(name)] or [scaling or {}]
        return one_of_both([rope_fields(parameters, theta, settings, part, kinds=kinds) for parameters in given])

    def write(layers: Layers) -> dict[str, Any]:
        rotated = {} if part is None else {PARTIAL: layers[0].rotary_percent}
        own = rope_scaling(layers[0]) or (None if scaling is None else {"rope_type": "default"})
        return {THETA: layers[0].rotary_base, SCALING: own, **rotated}

    return Rule((THETA, SCALING, PARAMETERS, PARTIAL), read, write)


ROPE = rope()

# ------------------------------------------------------------------------------------------------ layer types

WINDOW, USE, FIRST, TYPES = "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"
WINDOW_AGAIN = again("sliding_window_size", WINDOW)  # in Gemma-2's files
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")  # before layer_types, and beside them
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096

Types = Sequence[str]


def read_types(settings: Settings, default: Callable[[int], Types], window: int | None) -> Types:
    """Return the type of each layer. default: types of so many layers, where layer_types is missing."""
    num_layers = int(settings["num_hidden_layers"])
    types = settings.get(TYPES)
    types = default(num_layers) if types is None else types
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ConfigError(f"{TYPES} {unknown[0]!r} cannot be expressed; it can be {FULL}, {SLIDING}")
    if len(types) != num_layers:
        raise ConfigError(f"{TYPES} has {len(types)} entries, num_hidden_layers is {num_layers}")
    if SLIDING in types and window is None:
        raise ConfigError(f"{TYPES} has {SLIDING}, but {WINDOW} is null: the window of these layers is unknown")
    return tuple(types)


def every(period: int) -> Callable[[int], Types]:
    """Return the default types of an architecture with full attention in every layer of this period."""
    return lambda num_layers: [SLIDING if layer % period else FULL for layer in range(1, num_layers + 1)]


def by_type(types: Types, options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the model's options, of layers with the options of their types."""
    if len(set(types)) == 1:
        return options[types[0]]
    model = options[FULL]
    differing = {name: value for name, value in options[SLIDING].items() if value != model.get(name)}
    if differing.keys() <= {"window_size"}:
        return model | differing | {"window_attn_skip_freq": frequency([kind == FULL for kind in types])}
    settings = (f"{name}={as_text(value)}" for name, value in differing.items())
    return model | {"layer_pattern": pattern(types, {FULL: "", SLIDING: " ".join(settings)})}


def with_window(types: Types, window: int | None) -> dict[str, Any]:
    """Return the model's options, whose layers differ only in whether they have this window."""
    return by_type(types, {FULL: {"window_size": None}, SLIDING: {"window_size": window}})


def as_text(value: Any) -> str:
    """Return a value of an option, a whole number without a point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def pattern(types: Types, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of --layer-pattern, which repeat if the types do. settings: of each type."""
    period = next(n for n in range(1, len(types) + 1) if all(a == b for a, b in zip(types, types[n:], strict=False)))
    runs = [(kind, len(list(run))) for kind, run in groupby(types[:period])]
    words = [f"{count} {settings[kind]}".strip() for kind, count in runs]
    return (*words, REPEAT) if period < len(types) else tuple(words)


def frequency(marks: Sequence[bool]) -> str:
    """Return --window-attn-skip-freq: N if every N-th layer is marked and no other, else a list of runs of 0 and 1."""
    period = regular_period(marks)
    return runs_text([1 - mark for mark in marks]) if period is None else str(period)


def runs_text(numbers: Sequence[int]) -> str:
    """Return a list of 0 and 1 as Megatron's flags take it: [1]*3+[0]*2."""
    return "+".join(f"[{number}]*{len(list(run))}" for number, run in groupby(numbers))


def regular_period(marks: Sequence[bool]) -> int | None:
    """Return N if every N-th of the layers is marked and no other."""
    period = [*marks, True].index(True) + 1
    is_regular = all(mark == (layer % period == 0) for layer, mark in enumerate(marks, 1))
    return period if is_regular and True in marks else None


def at_distance(name: str, marks: Sequence[bool]) -> dict[str, Any]:
    """Return the key of the distance of marked layers, if they are at one distance."""
    period = regular_period(marks)
    return {} if period is None else {name: period}


def types_of(layers: Layers) -> list[str]:
    """Return the type of each layer."""
    return [FULL if layer.window_size is None else SLIDING for layer in layers]


def first_of_type(layers: Layers) -> dict[str, LayerConfig]:
    """Return the first layer of each type, any where there is none."""
    return {FULL: layers[0], SLIDING: layers[0]} | dict(reversed([*zip(types_of(layers), layers, strict=True)]))


def write_types(layers: Layers) -> dict[str, Any]:
    """Return layer_types, and the window if there is one: transformers refuses null beside layer_types."""
    window = first_of_type(layers)[SLIDING].window_size
    return {TYPES: types_of(layers)} | ({} if window is None else {WINDOW: window})


def windows(default: Callable[[int], Types], default_window: int = DEFAULT_WINDOW) -> Rule:
    """Return the rule of windows by layer type, beside rotary positions that are the same in all layers."""

    def read(settings: Settings) -> dict[str, Any]:
        window = settings.get(WINDOW, default_window)
        return with_window(read_types(settings, default if window is not None else every(1), window), window)

    return Rule((WINDOW, TYPES), read, write_types)


def windows_with_rope(
    default: Callable[[Settings, int], Types], default_window: int, pattern: str | None = None
) -> Rule:
    """Return the rule of layers that have a window and rotary positions, or neither.

    default: types of so many layers, where layer_types is missing. pattern: a key with the distance of layers without a
    window.
    """

    def read(settings: Settings) -> dict[str, Any]:
        window = settings.get(WINDOW, default_window)
        full = [kind == FULL for kind in read_types(settings, lambda count: default(settings, count), window)]
        if all(full):
            return {"position_embedding_type": "none", "rope_scaling_type": "none"}
        if not any(full):
            return {"window_size": window}
        marks = {"window_attn_skip_freq": frequency(full), "no_rope_freq": runs_text([int(mark) for mark in full])}
        return {"window_size": window, **marks}

    def write(layers: Layers) -> dict[str, Any]:
        full = [kind == FULL for kind in types_of(layers)]
        return write_types(layers) | ({} if pattern is None else at_distance(pattern, full))

    return Rule((WINDOW, TYPES, *(() if pattern is None else (pattern,))), read, write)


ROTATED, INTERVAL = "no_rope_layers", "no_rope_layer_interval"  # 1 for each layer with rotary positions


def rotated_layers(settings: Settings) -> list[bool]:
    """Return which layers have rotary positions: those of a list, or all but every so many."""
    count, interval = int(settings["num_hidden_layers"]), settings.get(INTERVAL, 4)
    return [bool(each) for each in settings.get(ROTATED) or (layer % interval for layer in range(1, count + 1))]


def write_rotated(layers: Layers) -> dict[str, Any]:
    """Return no_rope_layers, and the distance of layers without rotary positions if it is one."""
    rotated = [int(layer.position_embedding_type == "rope") for layer in layers]
    return {ROTATED: rotated} | at_distance(INTERVAL, [not each for each in rotated])


def rope_in_some_layers(base: float) -> Rule:
    """Return the rule of layers that have rotary positions, a window, both or neither, as SmolLM3's.

    base: the default of rope_theta.
    """
    positions = rope(base)

    def read(settings: Settings) -> dict[str, Any]:
        rotated, count = rotated_layers(settings), int(settings["num_hidden_layers"])
        if len(rotated) != count:
            raise ConfigError(f"{ROTATED} has {len(rotated)} entries, num_hidden_layers is {count}")
        window = settings.get(WINDOW) if settings.get(USE) else None
        has_window = [window is not None and not each for each in rotated]
        types = read_types(settings, lambda _: [SLIDING if each else FULL for each in has_window], window)
        if not any(rotated):
            return with_window(types, window) | {"position_embedding_type": "none"}
        without = {} if all(rotated) else {"no_rope_freq": runs_text([1 - each for each in rotated])}
        return positions.read(settings) | with_window(types, window) | without

    def write(layers: Layers) -> dict[str, Any]:
        rotated = tuple(layer for layer in layers if layer.position_embedding_type == "rope")
        keys = positions.write(rotated) if rotated else {}
        return keys | write_types(layers) | write_rotated(layers) | {USE: SLIDING in types_of(layers)}

    return Rule((*positions.keys, WINDOW, USE, FIRST, TYPES, ROTATED, INTERVAL), read, write)


def windows_and_rope(
    period: int,
    base: float,
    local_key: str | None = None,
    local_base: float | None = None,
    default_window: int = DEFAULT_WINDOW,
) -> Rule:
    """Return the rule of windows and rotary positions by layer type.

    period: every how many layers one has full attention by default. base: the default of rope_theta. local_key,
    local_base: the key of transformers 4 for rope_theta in layers with a window, and its default; None: rope_theta.
    """

    def read(settings: Settings) -> dict[str, Any]:
        nested, theta = settings.get(PARAMETERS), settings.get(THETA) or base
        local = (settings.get(local_key) if local_key is not None else None) or local_base or theta
        nested = {} if nested is None else nested
        unknown = sorted(set(nested) - {FULL, SLIDING})
        if unknown:
            raise ConfigError(f"{PARAMETERS}: the key {unknown[0]} cannot be expressed; they are {FULL} and {SLIDING}")
        full, scaling = nested.get(FULL) or {}, settings.get(SCALING)  # both of layers with full attention alone
        window = settings.get(WINDOW, default_window)
        options = {FULL: {"window_size": None}, SLIDING: {"window_size": window}}
        given = [full] if not scaling else [full | scaling, full] if full else [scaling]
        options[FULL] |= one_of_both([rope_fields(parameters, theta, settings) for parameters in given])
        options[SLIDING] |= rope_fields(nested.get(SLIDING) or {}, local, settings, base_key=local_key)
        public, private = (settings.get(name) for name in PATTERNS)
        types = read_types(settings, every(int(public or period)), window)
        if settings.get(TYPES) is None:  # with layer_types transformers saves the second key, whatever the types are
            check_alike({PATTERNS[0]: public or period, PATTERNS[1]: private})
        elif public is not None and tuple(every(int(public))(len(types))) != types:
            raise ConfigError(f"{TYPES} and {PATTERNS[0]} {public} contradict each other; remove one of the two")
        return by_type(types, options)

    def write(layers: Layers) -> dict[str, Any]:
        of_type = first_of_type(layers)
        keys = write_types(layers) | {THETA: of_type[FULL].rotary_base, SCALING: rope_scaling(of_type[FULL])}
        keys |= {} if local_key is None else {local_key: of_type[SLIDING].rotary_base}
        full = [kind == FULL for kind in types_of(layers)]
        keys |= {} if local_key is None else at_distance(PATTERNS[0], full)
        keys[PARAMETERS] = {
            kind: {THETA: layer.rotary_base, **(rope_scaling(layer) or {"rope_type": "default"})}
            for kind, layer in of_type.items()
        }
        return keys

    local_keys = () if local_key is None else (local_key, *PATTERNS)
    return Rule((THETA, SCALING, PARAMETERS, PARTIAL, WINDOW, TYPES, *local_keys), read, write)


# ------------------------------------------------------------------------------------------- Qwen and Mistral


def qwen_windows(
    has_window: Callable[[int, int], bool],
    write: Callable[[Layers], dict[str, Any]],
    uses: bool = False,
    default_bound: int = 28,
) -> Rule:
    """Return the rule of Qwen's sliding window, in effect with use_sliding_window.

    has_window: of a layer by its number and max_window_layers, where layer_types is missing. uses, default_bound: the
    defaults of both keys.
    """

    def read(settings: Settings) -> dict[str, Any]:
        window = settings.get(WINDOW, DEFAULT_WINDOW) if settings.get(USE, uses) else None
        bound = settings.get(FIRST, default_bound)

        def default(num_layers: int) -> Types:
            marks = (window is not None and has_window(layer, bound) for layer in range(num_layers))
            return [SLIDING if mark else FULL for mark in marks]

        return with_window(read_types(settings, default, window), window)

    return Rule((WINDOW, USE, FIRST, TYPES), read, write)


QWEN_WINDOWS = qwen_windows(
    lambda layer, first: layer >= first,
    lambda layers: (
        write_types(layers) | {USE: True, FIRST: types_of(layers).index(SLIDING)}
        if SLIDING in types_of(layers)
        else {USE: False}
    ),
)
QWEN_2_MOE_WINDOWS = qwen_windows(
    lambda layer, stop: layer % 2 == 0 and layer < stop,
    lambda layers: write_types(layers) | {USE: SLIDING in types_of(layers)},
)
QWEN_3_MOE_WINDOWS = Rule(  # in all layers; it reads no other key, but files have max_window_layers
    (WINDOW, USE, FIRST),
    lambda settings: {"window_size": settings.get(WINDOW, DEFAULT_WINDOW) if settings.get(USE, False) else None},
    lambda layers: {WINDOW: layers[0].window_size, USE: layers[0].window_size is not None},
)
MINISTRAL_WINDOWS = windows(lambda num_layers: [SLIDING] * num_layers)
# transformers takes a Mistral with layer_types as a Ministral; its own Mistral has one window, null for none
MISTRAL_WINDOWS = Rule(MINISTRAL_WINDOWS.keys, MINISTRAL_WINDOWS.read, lambda layers: {WINDOW: layers[0].window_size})

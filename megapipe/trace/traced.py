"""`TracedLayer`, a layer as it is run, and `Traced`, what layers have kept, made, multiplied and sent in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from megapipe.config.layers import LayerConfig
from megapipe.layers.table import Kept, total_bytes
from megapipe.schedule.action import Op

SIZES = (
    "masks",
    "rotary",
    "shared_masks",
    "shared_rotary",
    "fp8_weights",
    "waiting",
    "ahead",
    "slice_keys",
    "slice_key_gradients",
)
LEVELS = ("forward", "backward", "weights", "replayed", "recompute")
FACTS = "reads_weights", "output"  # of the layers, not of how many sequences they run
# names of what no element makes, of what comes from the layer or the stage before, and of a linear
STAGE, INPUT, OUTPUT_LAYER = "stage", "input", "output_layer"
CORE_ATTENTION = "core_attention"  # that of an element


class TracedLayer(NamedTuple):
    """One layer. is_fp8: its linears multiply in 8 bits. comm_type: how it reaches the keys of other cp ranks.
    imbalance: rows that reach this rank's experts, over the mean. frozen: linears whose weights are not trained.
    """

    config: LayerConfig
    is_fp8: bool
    comm_type: str
    imbalance: float = 1.0
    frozen: tuple[str, ...] = ()


class Product(NamedTuple):
    """A product of weights, or of their gradients: [tokens, inputs] x [inputs, outputs] in F, and in I, where `inputs`
    are the linear's outputs; in W [inputs, tokens] x [tokens, outputs].

    name: of the linear, as its module's in a layer, or of an element. again: a backward computes it again. matrices:
    those of experts. times: their number. tokens: of all of them, and of all matrices, together.
    """

    name: str
    op: Op  # F, I or W, also in a whole B
    again: bool
    is_fp8: bool
    inputs: int
    outputs: int
    matrices: int
    times: int
    tokens: int

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.inputs * self.outputs

    @property
    def num_weights(self) -> int:
        return self.matrices * self.inputs * self.outputs


class Message(NamedTuple):
    """Collectives of a linear or an element that are alike.

    times: their number. num_bytes: of all their tensors, whole; what comes of an exchange, if more than what goes.
    """

    name: str
    op: Op  # F, I for B too, or W
    again: bool
    group: str
    operation: str
    times: int
    num_bytes: int


class AttentionWork(NamedTuple):
    """Core attention, softmax(q k^T) v: the forward of a fused kernel, with the FLOPs of the keys that queries see, or
    what is written out, where all keys are multiplied.

    kernel: the fused one: 'cudnn', 'flash2', 'efficient', which takes masks, or 'cpu'; '' where it is written out.
    keys: that a query has in the mean of one call. head_size: channels of a query's head. moved_bytes: of matrices of
    queries and keys, by kernels that are no products.
    """

    name: str
    op: Op  # F, or I for B too
    again: bool
    kernel: str
    keys: float
    head_size: int
    flops: int
    moved_bytes: int


Row = Product | Message | AttentionWork
ROWS: dict[str, type[Row]] = {"products": Product, "messages": Message, "attention": AttentionWork}
NUM_SIZES: dict[str, int] = {"products": 3, "messages": 2, "attention": 2}  # of a row, which come last


@dataclass(frozen=True)
class Traced:
    """Tensors, products, attention and messages of one microbatch, or a slice of it, on one rank. Sizes are in bytes.

    forward, backward, weights: of F, B (I where the shape splits the backward) and W, at each tensor that it makes, the
    bytes over those that are there when it starts, the gradient of the output aside; of F over what it keeps. The last
    level of a B is that of its end, with the gradient of the input, and with what the autograd graph holds besides the
    input. replayed: at each tensor of B or I, those that it has computed again. recompute: as `weights`, of RECOMPUTE.
    """

    kept: tuple[Kept, ...]  # from F to B or I, the input included; named after the element that has made it
    masks: int = 0  # of documents, kept besides; and rotary tables of this microbatch's positions
    rotary: int = 0
    shared_masks: int = 0  # that all microbatches have in common
    shared_rotary: int = 0
    fp8_weights: int = 0  # copies of the weights in 8 bits
    waiting: int = 0  # from I to W
    ahead: int = 0  # from RECOMPUTE to B or I
    slice_keys: int = 0  # keys and values of all slices of a microbatch, and their gradients
    slice_key_gradients: int = 0
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    reads_weights: bool = False  # W does, to compute again what is not kept
    products: tuple[Product, ...] = ()
    messages: tuple[Message, ...] = ()
    attention: tuple[AttentionWork, ...] = ()
    output: str = STAGE  # the element that makes it

    @cached_property
    def kept_bytes(self) -> int:
        return total_bytes(self.kept)

    @cached_property
    def peaks(self) -> tuple[int, int, int]:
        """The most that F, B or I, and W make over what is there when they start, and F over what it keeps."""
        forward, backward, weights = (max((0, *levels)) for levels in (self.forward, self.backward, self.weights))
        return forward, backward, weights

    @cached_property
    def replay(self) -> int:
        """The most that B or I computes again and holds."""
        return max((0, *self.replayed))

    def after(self, element: str) -> Traced:
        """Return it behind the element that makes its input."""
        return replace(
            self, kept=tuple(replace(each, name=element) if each.name == INPUT else each for each in self.kept)
        )

    def at(self, larger: Traced, more: int, has_levels: bool = True) -> Traced | None:
        """Return it for so many sequences more. larger: for one more. has_levels: False to leave levels out.

        Every size is affine in the number of sequences, so a peak, their maximum, is not: hence all levels. None if
        other tensors are made, such as more blocks of a loss.
        """

        def line(one: int, two: int) -> int:
            return one + more * (two - one)

        names = [[(tensor.name, tensor.element_bytes) for tensor in each.kept] for each in (self, larger)]
        levels = {name: (getattr(self, name), getattr(larger, name)) for name in LEVELS if has_levels}
        rows = {name: (getattr(self, name), getattr(larger, name)) for name in ROWS}
        if names[0] != names[1] or any(len(one) != len(two) for one, two in levels.values()):
            return None
        if any(
            [each[: -NUM_SIZES[name]] for each in one] != [each[: -NUM_SIZES[name]] for each in two]
            for name, (one, two) in rows.items()
        ):
            return None
        kept = (
            replace(one, elements=line(one.elements, two.elements))
            for one, two in zip(self.kept, larger.kept, strict=True)
        )
        found: dict[str, Any] = {name: getattr(self, name) for name in FACTS}
        found |= {name: line(getattr(self, name), getattr(larger, name)) for name in SIZES}
        found |= {name: tuple(map(line, *each)) for name, each in levels.items()}
        for name, pair in rows.items():
            found[name] = tuple(
                type(one)(*one[: -NUM_SIZES[name]], *map(line, one[-NUM_SIZES[name] :], two[-NUM_SIZES[name] :]))
                for one, two in zip(*pair, strict=True)
            )
        return Traced(tuple(kept), **found)

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        kept = [[tensor.name, tensor.elements, tensor.element_bytes] for tensor in self.kept]
        rows = {name: [[each.name, each.op.name, *each[2:]] for each in getattr(self, name)] for name in ROWS}
        others = {name: getattr(self, name) for name in (*SIZES, *LEVELS, *FACTS)}
        return {"kept": kept} | rows | others

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Traced:
        """Return what `as_data` has returned. Raises KeyError, TypeError."""
        found: dict[str, Any] = {name: data[name] for name in (*SIZES, *FACTS)}
        found |= {name: tuple(data[name]) for name in LEVELS}
        for name, kind in ROWS.items():
            found[name] = tuple(kind(called, Op[op], *others) for called, op, *others in data[name])
        return cls(tuple(Kept(*tensor) for tensor in data["kept"]), **found)


def joined(traces: Sequence[Traced], is_checkpoint: bool = False) -> Traced:
    """Return the trace of the residual branches of a layer, or of parts of them, from one of each, in their order; with
    the levels of a B, and not of I and W, where the first W of a branch starts before the last one behind it has ended.

    is_checkpoint: the input of the first is kept alone.
    """
    kept, levels = list(traces[0].kept), {name: list[int]() for name in LEVELS}
    for before, traced in pairwise(traces):
        others = (each for each in traced.kept if each.name != INPUT)
        kept += others if is_checkpoint else traced.after(before.output).kept
    found: dict[str, Any] = {name: sum(getattr(traced, name) for traced in traces) for name in SIZES}
    for name in ROWS:  # a forward runs them in their order, a backward in the other
        ahead = [each for traced in traces for each in getattr(traced, name) if each.op is Op.F]
        back = [each for traced in reversed(traces) for each in getattr(traced, name) if each.op is not Op.F]
        found[name] = *ahead, *back
    later = sum(traced.kept_bytes for traced in traces)
    for traced in traces:
        later -= traced.kept_bytes  # levels of F are over all that is kept in the end
        levels["forward"] += [level - later for level in traced.forward]
    for traced in reversed(traces):
        start = levels["backward"][-1] if levels["backward"] else 0  # where the one behind it has ended
        levels["backward"] += [start + level for level in traced.backward]
        levels["replayed"] += traced.replayed
    found |= {name: tuple(each) for name, each in levels.items()}
    reads_weights = any(traced.reads_weights for traced in traces)
    return Traced(tuple(kept), reads_weights=reads_weights, output=traces[-1].output, **found)

"""`StageBuffers`: the parameters and main gradients of one stage, as views of flat tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.data_parallel.store import ALONE, Sharing, Store
from megapipe.sharding.buffers import BufferLayout
from megapipe.sharding.spec import ParamSpec

Draw = Callable[[ParamSpec], Tensor]
# (main gradient, uses, called when ready) -> the object through which a hand-written backward accumulates:
# tensor_parallel's GradientSlot
SlotFactory = Callable[[Tensor, int, Callable[[Any], None]], Any]


class StageBuffers:
    """Flat buffers of one stage on one rank. slots: the place of each parameter, by name.

    layouts: positions of the parameters (sharding.buffers). grad_dtype: of the main gradients, None for inference.
    trained: the buffers with gradients.
    num_versions: of the parameters; all versions share one main gradient. is_apart, changes_in_flight: see `Store`.
    sharing, expert_sharing: who holds the same dense parameters and experts; parameter() and main_grad() return empty
    memory while only shards are kept.
    `listener`, if set, is called with a parameter's name whenever the gradient of one microbatch has been added to it.
    """

    def __init__(
        self,
        layouts: Sequence[BufferLayout],
        device: torch.device | str = "cpu",
        param_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype | None = torch.float32,
        num_versions: int = 1,
        sharing: Sharing = ALONE,
        expert_sharing: Sharing = ALONE,
        is_apart: bool = False,
        changes_in_flight: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.num_versions = num_versions
        self.changes_in_flight = changes_in_flight
        options = (self.device, param_dtype, grad_dtype, num_versions, is_apart, changes_in_flight)
        self.buffers = tuple(
            Store(layout, expert_sharing if layout.is_expert else sharing, *options) for layout in layouts
        )
        self.trained = tuple(buffer for buffer in self.buffers if buffer.layout.trainable)
        self.borrowed: tuple[Store, ...] = ()  # of another stage, of which the module uses parameters
        self.listener: Callable[[str], None] | None = None
        self.unpredictable: frozenset[str] = frozenset()  # the listener is called unknown times per microbatch
        # (a submodule's _parameters, attribute, versions) of every place in the module that holds a parameter
        self._holders: list[tuple[dict[str, nn.Parameter | None], str, tuple[nn.Parameter, ...]]] = []
        # name -> (versions, gradient slot or None), filled by `materialize`
        self._materialized: dict[str, tuple[tuple[nn.Parameter, ...], Any]] = {}
        self.slots = {slot.spec.name: (buffer, slot) for buffer in self.buffers for slot in buffer.layout.slots}
        self._parameters: dict[str, tuple[Tensor, ...]] = {}  # by version
        self._main_grads: dict[str, Tensor] = {}
        for name, (buffer, slot) in self.slots.items():
            place = slice(slot.start, slot.stop)
            self._parameters[name] = tuple(version[place].view(slot.shape) for version in buffer.versions)
            if grad_dtype is not None and buffer.layout.trainable:
                self._main_grads[name] = buffer.accumulated[place].view(slot.shape)
        for buffer in self.buffers:
            buffer.free_shared()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.slots)

    @property
    def trained_names(self) -> tuple[str, ...]:
        return tuple(self._main_grads)

    @property
    def newest(self) -> int:
        """The version that `parameter`, the optimizer and the gather use."""
        return self.buffers[0].newest if self.buffers else 0

    @newest.setter
    def newest(self, version: int) -> None:
        for buffer in self.buffers:
            buffer.newest = version

    def parameter(self, name: str, version: int | None = None) -> Tensor:
        """Return one parameter in its local shape, a view of the flat buffer. version: None for the newest."""
        return self._parameters[name][self.newest if version is None else version]

    def main_grad(self, name: str) -> Tensor:
        """Return the main gradient of a trainable parameter, to which backwards add: its local shape, a view."""
        return self._main_grads[name]

    def fill(self, draw: Draw) -> None:
        """Set every parameter to draw(spec), which returns its local values in any floating dtype."""
        for buffer, bucket in ((held, bucket) for held in self.buffers for bucket in held.layout.buckets):
            start, held = buffer.held_parameters(bucket)
            for slot in bucket.slots:
                low, high = max(slot.start, start), min(slot.stop, start + held.numel())
                if low >= high:
                    continue
                values = draw(slot.spec)
                if values.shape != slot.shape:
                    found = f"the initial values have shape {tuple(values.shape)}, its slot {slot.shape}"
                    raise ValueError(f"{slot.spec.name}: {found}")
                held[low - start : high - start] = values.reshape(-1)[low - slot.start : high - slot.start]

    def materialize(
        self,
        module: nn.Module,
        draw: Draw | None = None,
        slot_factory: SlotFactory | None = None,
        lender: StageBuffers | None = None,
    ) -> None:
        """Replace the module's (meta) parameters by views of the buffers, and route their gradients into the buffers.

        Names are those of module.named_parameters(); a Parameter that two submodules share stays shared. Submodules
        with a dict `slots` (hand-written backwards) get a slot from slot_factory for each parameter they hold directly.
        Every trained parameter also gets a hook that adds the .grad that autograd left to the main gradient and clears
        it.
        draw: fills the parameters. lender: buffers of another stage that were materialized before; parameters that
        these buffers lack are shared with it by name, including the slot (the tied embedding of a rank that holds both
        the first and the last stage). Raises ValueError if the module's names or shapes differ from the layouts'.
        """
        self._check(module, lender)
        if draw is not None:
            self.fill(draw)
        held: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # by which submodules, as which attribute
        for submodule in module.modules():
            for attribute, parameter in submodule._parameters.items():
                if parameter is not None:
                    held.setdefault(parameter, []).append((submodule, attribute))
        names = {parameter: name for name, parameter in module.named_parameters()}
        unpredictable = set()
        for old, places in held.items():
            name = names[old]
            if name not in self.slots:
                assert lender is not None
                lender._lend(name, places)
                self.borrowed += (lender.slots[name][0],)
                continue
            needs_gradient = old.requires_grad and self.slots[name][0].layout.trainable
            versions = tuple(
                nn.Parameter(self.parameter(name, v), requires_grad=needs_gradient) for v in range(self.num_versions)
            )
            self._holders += [(owner._parameters, attribute, versions) for owner, attribute in places]
            slot = None
            if self._main_grads and needs_gradient:
                uses, slot = self._install_slots(name, places, slot_factory)
                if 0 < uses < len(places):  # autograd, which calls the hook once per backward, contributes too
                    unpredictable.add(name)
                for version in versions:
                    version.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))
            self._materialized[name] = versions, slot
        self.unpredictable = frozenset(unpredictable)
        self.install(self.newest)

    def install(self, version: int) -> None:
        """Let the module compute with this version from now on.

        Tensors saved by earlier forwards are unaffected, since versions share no memory.
        """
        for parameters, attribute, versions in self._holders:
            parameters[attribute] = versions[version]

    def _lend(self, name: str, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Share a parameter of these buffers with another stage's module."""
        versions, slot = self._materialized[name]
        for owner, attribute in places:
            self._holders.append((owner._parameters, attribute, versions))
            owner._parameters[attribute] = versions[self.newest]
            slots = getattr(owner, "slots", None)
            if isinstance(slots, dict) and slot is not None:
                slots[attribute] = slot

    def _install_slots(
        self, name: str, places: Sequence[tuple[nn.Module, str]], slot_factory: SlotFactory | None
    ) -> tuple[int, Any]:
        """Give the submodules with hand-written backwards one common slot; return their number and the slot.

        A submodule that is called several times for a microbatch says how often: `uses`.
        """
        found = [(getattr(owner, "slots", None), attribute) for owner, attribute in places]
        by_hand = [(slots, attribute) for slots, attribute in found if isinstance(slots, dict)]
        if slot_factory is None or not by_hand:
            return 0, None
        uses = sum(getattr(owner, "uses", 1) for owner, _ in places if isinstance(getattr(owner, "slots", None), dict))
        slot = slot_factory(self._main_grads[name], uses, lambda _: self._notify(name))
        for slots, attribute in by_hand:
            slots[attribute] = slot
        return len(by_hand), slot

    def _notify(self, name: str) -> None:
        if self.listener is not None:
            self.listener(name)

    def _check(self, module: nn.Module, lender: StageBuffers | None) -> None:
        wanted = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        lent = {} if lender is None else {name: lender.slots[name] for name in lender._materialized if name in wanted}
        held = {name: slot.shape for name, (_, slot) in (lent | self.slots).items()}
        if wanted.keys() != held.keys():
            raise ValueError(
                f"only in the module: {sorted(wanted.keys() - held.keys())}; "
                f"only in the buffers: {sorted(held.keys() - wanted.keys())}"
            )
        for name, shape in held.items():
            if wanted[name] != shape:
                raise ValueError(f"{name}: the module has shape {wanted[name]}, its slot {shape}")


def _hook(buffers: weakref.ref[StageBuffers], name: str) -> Callable[[Tensor], None]:
    """Return a parameter's hook."""

    # weak: the buffers hold the parameter, and Python's collector cannot see a cycle through autograd
    def add(parameter: Tensor) -> None:
        alive = buffers()
        if alive is None or parameter.grad is None:  # the hook also runs if the backward returned None
            return
        alive._main_grads[name].add_(parameter.grad)
        parameter.grad = None
        alive._notify(name)

    return add

"""`StageBuffers`: the parameters and main gradients of one stage as views of flat tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megapipe.sharding.buffers import Bucket, BufferLayout, Slot
from megapipe.sharding.spec import ParamSpec

ALIGNMENT_BYTES = 64  # kernels may change their bits with alignment

Draw = Callable[[ParamSpec], Tensor]


class SlotFactory(Protocol):
    """Makes the object through which a hand-written backward accumulates: tensor_parallel's GradientSlot."""

    def __call__(self, main_grad: Tensor, uses: int, on_ready: Callable[[Any], None]) -> Any: ...


class FlatBuffer:
    """One buffer layout made of tensors.

    versions: [layout.numel] in the parameters' dtype, one for each version of the weights that may be needed at once: one only, unless the
    schedule is asynchronous. newest: index of the one that was updated last. gradients: [layout.numel], fp32 (fp64 in fp64 runs), None
    without training. Padding between slots is and stays zero.
    """

    def __init__(
        self,
        layout: BufferLayout,
        device: torch.device,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype | None,
        num_versions: int = 1,
    ) -> None:
        self.layout = layout
        self.versions = tuple(_aligned_zeros(layout.numel, param_dtype, device) for _ in range(num_versions))
        self.newest = 0
        self._gradients = None if grad_dtype is None else _aligned_zeros(layout.numel, grad_dtype, device)

    @property
    def parameters(self) -> Tensor:
        """The newest version."""
        return self.versions[self.newest]

    @property
    def gradients(self) -> Tensor:
        if self._gradients is None:
            raise RuntimeError("these buffers were made without gradients (grad_dtype=None)")
        return self._gradients

    @property
    def has_gradients(self) -> bool:
        return self._gradients is not None

    def shard_range(self, bucket: Bucket, index: int) -> tuple[int, int]:
        """Elements of the buffer that member `index` of the replica group updates: its shard, or the whole bucket if there is one shard."""
        return bucket.shard(index if self.layout.num_shards > 1 else 0, self.layout.num_shards)


class StageBuffers:
    """Flat buffers of one stage on one rank.

    layouts: what lies where (sharding.buffers). param_dtype: of the module's parameters. grad_dtype: of the main gradients, None for
    inference. num_versions: of the parameters; their gradients add up in one place. `listener`, if set, is called with a parameter's name
    whenever one microbatch's gradient of it has been added.
    """

    def __init__(
        self,
        layouts: Sequence[BufferLayout],
        device: torch.device | str = "cpu",
        param_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype | None = torch.float32,
        num_versions: int = 1,
    ) -> None:
        self.device = torch.device(device)
        self.num_versions = num_versions
        self.buffers = tuple(
            FlatBuffer(layout, self.device, param_dtype, grad_dtype, num_versions) for layout in layouts
        )
        self.listener: Callable[[str], None] | None = None
        self.unpredictable: frozenset[str] = frozenset()  # notified an unknown number of times in one microbatch
        self._places: list[
            tuple[dict[str, nn.Parameter | None], str, tuple[nn.Parameter, ...]]
        ] = []  # where the versions of each stand
        self._main_grads: dict[str, Tensor] = {}
        self._made: dict[
            str, tuple[tuple[nn.Parameter, ...], Any]
        ] = {}  # by `materialize`: versions and slot, None without a slot
        self._slot_of = {slot.spec.name: (buffer, slot) for buffer, slot in self._slots()}
        for buffer, slot in self._slots():
            if buffer.has_gradients:
                self._main_grads[slot.spec.name] = buffer.gradients[slot.start : slot.stop].view(slot.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slot_of)

    @property
    def newest(self) -> int:
        """The version that `parameter`, the optimizer and the gather mean."""
        return self.buffers[0].newest if self.buffers else 0

    @newest.setter
    def newest(self, version: int) -> None:
        for buffer in self.buffers:
            buffer.newest = version

    def parameter(self, name: str, version: int | None = None) -> Tensor:
        """The values of one parameter, local shape, a view of the flat buffer. version: the newest if None."""
        buffer, slot = self._slot_of[name]
        return buffer.versions[buffer.newest if version is None else version][slot.start : slot.stop].view(slot.shape)

    def main_grad(self, name: str) -> Tensor:
        """The main gradient of one parameter, local shape, a view of the flat buffer."""
        return self._main_grads[name]

    def zero_gradients(self) -> None:
        for buffer in self.buffers:
            buffer.gradients.zero_()

    def fill(self, draw: Draw) -> None:
        """Set every parameter to draw(spec), its local values in any floating dtype."""
        for _, slot in self._slots():
            values = draw(slot.spec)
            if values.shape != slot.shape:
                raise ValueError(
                    f"{slot.spec.name}: drawn values have shape {tuple(values.shape)}, its slot {slot.shape}"
                )
            self.parameter(slot.spec.name).copy_(values)

    def materialize(
        self,
        module: nn.Module,
        draw: Draw | None = None,
        slot_factory: SlotFactory | None = None,
        lender: StageBuffers | None = None,
    ) -> None:
        """Swap the module's (meta) parameters for views of the buffers, filled by draw, and route their gradients into them.

        Names are those of module.named_parameters(); a Parameter that two submodules share stays one. Submodules with a dict `slots`
        (hand-written backwards) get a slot made by slot_factory for each of their own parameters; every parameter also gets a hook that
        adds what autograd leaves in .grad to the main gradient and drops it.
        lender: buffers of another stage, materialized before: parameters of that name that these buffers lack become the very same
        Parameter with the same slot (the tied embedding of a rank that holds the first stage and the last).
        Raises ValueError if the module's names or shapes are not those of the layouts.
        """
        self._check(module, {} if lender is None else lender._made)
        if draw is not None:
            self.fill(draw)
        holders = _holders(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        unpredictable = set()
        for old, places in holders:
            name = names[id(old)]
            if name not in self._slot_of:
                assert lender is not None
                lender._lend(name, places)
                continue
            versions = tuple(
                nn.Parameter(self.parameter(name, v), requires_grad=old.requires_grad) for v in range(self.num_versions)
            )
            self._places += [(owner._parameters, attribute, versions) for owner, attribute in places]
            slot = None
            if self._main_grads and old.requires_grad:
                uses, slot = self._install_slots(name, places, slot_factory)
                if 0 < uses < len(places):  # partly by autograd, which speaks once a backward, partly by hand
                    unpredictable.add(name)
                for version in versions:
                    version.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))
            self._made[name] = versions, slot
        self.unpredictable = frozenset(unpredictable)
        self.install(self.newest)

    def install(self, version: int) -> None:
        """Let the module compute with this version from now on. What a forward has saved stays what it was: versions share no memory."""
        for held, attribute, versions in self._places:
            held[attribute] = versions[version]

    def _lend(self, name: str, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Let a parameter of these buffers stand in another stage's module, too."""
        versions, slot = self._made[name]
        for owner, attribute in places:
            self._places.append((owner._parameters, attribute, versions))
            owner._parameters[attribute] = versions[self.newest]
            slots = getattr(owner, "slots", None)
            if isinstance(slots, dict) and slot is not None:
                slots[attribute] = slot

    def _install_slots(
        self, name: str, places: Sequence[tuple[nn.Module, str]], slot_factory: SlotFactory | None
    ) -> tuple[int, Any]:
        """Give the submodules that accumulate by hand one common slot; returns how many they are, and the slot."""
        found = [(getattr(owner, "slots", None), attribute) for owner, attribute in places]
        by_hand = [(slots, attribute) for slots, attribute in found if isinstance(slots, dict)]
        if slot_factory is None or not by_hand:
            return 0, None
        slot = slot_factory(self._main_grads[name], len(by_hand), lambda _: self._added(name))
        for slots, attribute in by_hand:
            slots[attribute] = slot
        return len(by_hand), slot

    def _add_autograd(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None:  # the hook also fires for a backward that returned None
            return
        self._main_grads[name].add_(parameter.grad)
        parameter.grad = None
        self._added(name)

    def _added(self, name: str) -> None:
        if self.listener is not None:
            self.listener(name)

    def _slots(self) -> Iterator[tuple[FlatBuffer, Slot]]:
        for buffer in self.buffers:
            for slot in buffer.layout.slots:
                yield buffer, slot

    def _check(self, module: nn.Module, lent: Mapping[str, tuple[tuple[nn.Parameter, ...], Any]]) -> None:
        wanted = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        held = {slot.spec.name: slot.shape for _, slot in self._slots()}
        held |= {
            name: tuple(versions[0].shape)
            for name, (versions, _) in lent.items()
            if name in wanted and name not in held
        }
        if wanted.keys() != held.keys():
            raise ValueError(
                f"only in the module: {sorted(wanted.keys() - held.keys())}; only in the buffers: {sorted(held.keys() - wanted.keys())}"
            )
        for name, shape in held.items():
            if wanted[name] != shape:
                raise ValueError(f"{name}: the module has shape {wanted[name]}, its slot {shape}")


def _hook(buffers: weakref.ref[StageBuffers], name: str) -> Callable[[Tensor], None]:
    """A parameter's hook. Weak: the buffers hold the parameter, and the collector does not see a circle through autograd."""

    def add(parameter: Tensor) -> None:
        held = buffers()
        if held is not None:
            held._add_autograd(name, parameter)

    return add


def _holders(module: nn.Module) -> list[tuple[Tensor, list[tuple[nn.Module, str]]]]:
    """Each distinct parameter with the (submodule, attribute) pairs that hold it, in model order."""
    found: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
    for submodule in module.modules():
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((submodule, attribute))
    return list(found.values())


def _aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    raw = torch.zeros(numel + ALIGNMENT_BYTES // dtype.itemsize, dtype=dtype, device=device)
    start = -raw.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
    return raw[start : start + numel]

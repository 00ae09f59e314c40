"""`TapeRecorder`: a CPU replacement for CUDA graphs that follows their rules.

- Recording has no lasting effect: existing tensors get their values back, new ones hold NaN.
- A replay runs the recorded operations on the recorded memory, so results appear in the same tensors. Python code
  between the operations does not run.
- gloo collectives replace those of NCCL: a replay starts them again and waits for them.
- Operations that read a value on the host, or copy one from it, cannot be recorded.
- Memory that is unreferenced when a recording ends may be reused by it: it holds NaN after each replay, even if
  something else has written to it.
- Replaying a read of outside memory that has been freed raises an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megapipe.pipeline.graphs import CudaRecorder

HOST = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}


class Memory:
    """Storages of a pool or of the memory outside, with counts of the tapes' own references to them."""

    def __init__(self) -> None:
        self.held: dict[int, UntypedStorage] = {}
        self._aliases: Counter[int] = Counter()

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory that belongs to the tapes."""
        at = storage(tensor)
        if at not in self.held:
            self.held[at] = tensor.untyped_storage()
        self._aliases[at] += 1
        return tensor.data

    def is_free(self, at: int) -> bool:
        return int(torch._C._storage_Use_Count(self.held[at]._cdata)) <= self._aliases[at] + 1


class Pool(Memory):
    def __init__(self, outside: Memory) -> None:
        super().__init__()
        self.tapes: list[Tape] = []
        self.outside = outside


class Tape(TorchDispatchMode):
    """A recording of the operations inside `with tape:`."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool, self._outside = pool, pool.outside
        self._steps: list[
            tuple[Any, Any, Any, list[tuple[int, Tensor]]]
        ] = []  # operation, arguments, results to be written
        self._before: dict[int, Tensor] = {}  # outside memory: storage -> bytes before the recording
        self._read: set[int] = set()  # outside memory
        self._collected: set[int] = set()  # by collectives
        self._freed: list[UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func is torch.ops.aten.copy_.default and storage(args[0]) in self._collected:
            return func(*args, **(kwargs or {}))  # internal to gloo, at the end of a reduce-scatter
        given = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and storage(leaf) not in self._pool.held:
                self._before.setdefault(storage(leaf), _bytes(leaf.untyped_storage()).clone())
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [(i, self._pool.alias(tensor)) for i, tensor in enumerate(results) if storage(tensor) not in given]
        if func.namespace == "c10d":
            self._collected |= given
        if new or func._schema.is_mutable or func.namespace == "c10d":  # otherwise it is a view
            self._steps.append((func, *tree_map(self._kept, (args, kwargs or {})), new))
        return result

    def end(self) -> None:
        """Undo the recorded operations and collect the memory that is no longer referenced."""
        for at, before in self._before.items():
            if at in self._outside.held:
                _bytes(self._outside.held[at]).copy_(before)
        self._before.clear()
        for *_, new in self._steps:
            for _, tensor in new:
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        self._freed = [held for at, held in self._pool.held.items() if self._pool.is_free(at)]

    def replay(self) -> None:
        lost = [at for at in self._read if self._outside.is_free(at)]
        if lost:
            raise RuntimeError(f"a replay would read memory that was given back, {len(lost)} tensors")
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, new in self._steps:
                leaves = tree_leaves(func(*args, **kwargs))
                for leaf in leaves:
                    if isinstance(leaf, torch.ScriptObject):
                        Work.unbox(leaf).wait()
                results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                for i, tensor in new:
                    tensor.copy_(results[i])
        for freed in self._freed:
            _bytes(freed).fill_(255)  # NaN in every dtype

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if storage(leaf) in self._pool.held:
            return self._pool.alias(leaf)
        self._read.add(storage(leaf))
        return self._outside.alias(leaf)


class TapeRecorder(CudaRecorder):
    """A recorder of tapes.

    pools: in the order in which they were requested.
    """

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self._outside = Memory()

    def pool(self) -> Pool:
        self.pools.append(Pool(self._outside))
        return self.pools[-1]

    def record(self, work: Callable[[], Any], pool: Pool) -> tuple[Callable[[], None], Any]:
        tape = Tape(pool)
        with tape:
            result = work()
        tape.end()
        pool.tapes.append(tape)
        return tape.replay, result


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(of: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(of)  # type: ignore[call-overload,no-any-return]

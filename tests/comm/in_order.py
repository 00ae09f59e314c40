"""Communicators for tests that behave like NCCL's in what matters for the order of messages, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.comm import channels

TAG, TENSOR, ARRIVED = range(3)  # gloo's tags


class InOrderCommunicator:
    """A communicator of two ranks: an operation starts when the one before has ended, a send ends with its receive.

    A tag travels ahead of each tensor; NCCL would deliver a tensor to a receive with another tag.
    """

    def __init__(self, handle: Any) -> None:
        self._handle, self._thread = handle, ThreadPoolExecutor(1, "communicator")
        self._error: RuntimeError | None = None  # the first one, which all later operations raise

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        return self._start(self._send, tensors, peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Pending:
        return self._start(self._recv, tensors, peer, tag)

    def _start(self, operation: Callable[..., None], *arguments: Any) -> Pending:
        return Pending(self._thread.submit(self._run, operation, *arguments))

    def _run(self, operation: Callable[..., None], *arguments: Any) -> None:
        if self._error is not None:
            raise self._error
        try:
            operation(*arguments)
        except RuntimeError as error:
            self._error = error
            raise

    def _send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        self._handle.send([torch.tensor([tag])], peer, TAG).wait()
        self._handle.send(list(tensors), peer, TENSOR).wait()
        self._handle.recv([torch.empty(1)], peer, ARRIVED).wait()

    def _recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        sent = torch.empty(1, dtype=torch.int64)
        self._handle.recv([sent], peer, TAG).wait()
        if sent.item() != tag:
            raise RuntimeError(f"a receive with tag {tag} meets a send with tag {sent.item()}")
        self._handle.recv(list(tensors), peer, TENSOR).wait()
        self._handle.send([torch.empty(1)], peer, ARRIVED).wait()


class Pending:
    """An operation in flight, with the methods of torch's handle."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


@contextmanager
def in_order_communicators() -> Iterator[None]:
    """Let `Channels.build` create these communicators inside, as it does over NCCL."""

    def new_handle(ranks: Sequence[int], name: str, backend: str, timeout_seconds: float, *_: Any) -> Any:
        timeout = timedelta(seconds=timeout_seconds)
        handle = dist.new_group(list(ranks), timeout=timeout, backend="gloo", group_desc=name)
        return InOrderCommunicator(handle) if dist.get_rank() in ranks else None

    with (
        patch.object(channels, "backend_of", lambda group: "nccl"),
        patch.object(channels, "new_handle", new_handle),
        patch.object(torch.cuda, "synchronize", lambda: None),
    ):
        yield

"""`CoreAttention`: the operations that compute the core attention of a layer, while it runs without values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapipe.sharding.sequence import Visibility
from megapipe.trace.libraries import LIBRARIES, NAMESPACE

PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
FUSED = {  # kernels by their schema
    "aten::_scaled_dot_product_flash_attention": "cudnn",  # which torch prefers, and which keeps the same
    "aten::_scaled_dot_product_flash_attention_for_cpu": "cpu",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "torch_attn::_varlen_attn": "flash2",
    **{f"{NAMESPACE}::{library.name}": library.name for library in LIBRARIES.values()},
}
NOT_READ = ("random_", "copy_")  # functions with these names do not read what they write


@dataclass
class CoreAttention:
    """Core attention of one layer. queries: of all heads. head_size: channels of each. seen: the keys that they see.

    kernels: the fused ones that were called, with the channels of a key and of a value together. matrix: elements of
    the matrix of queries and keys at hand, the largest tensor of the last product.
    """

    queries: int
    head_size: int
    seen: Visibility
    kernels: set[tuple[str, int]] = field(default_factory=set)
    flops: int = 0
    moved_bytes: int = 0
    matrix: int = sys.maxsize

    @property
    def keys(self) -> int:
        """Keys of all queries, seen or not."""
        return self.seen.place.stop

    def see(self, func: Any, args: Sequence[Any], made: Any) -> None:
        """Count an operation of the forward."""
        if kernel := FUSED.get(func._schema.name):
            q, _, v = args[:3]
            self.kernels.add((kernel, q.shape[-1] + v.shape[-1]))
        else:
            flops, moved_bytes = self.written(func, args, made)
            self.flops, self.moved_bytes = self.flops + flops, self.moved_bytes + moved_bytes

    def forward(self) -> tuple[str, float, int, int]:
        """Return the fused kernel, or '' where attention is written out; the keys of a query in the mean of one call;
        FLOPs, and moved bytes. A fused kernel has the FLOPs of what is seen.
        """
        if not self.kernels:
            return "", self.keys, self.flops, self.moved_bytes
        kernel, channels = max(self.kernels)  # 'efficient' where some blocks have masks
        keys = self.seen.mean_keys
        return kernel, keys / self.seen.part.ranks, round(2 * self.queries * keys * channels), 0

    def written(self, func: Any, args: Sequence[Any], made: Any) -> tuple[int, int]:
        """Return the FLOPs of a product, and the bytes of matrices of queries and keys that another kernel moves."""
        read = [each for each in args if isinstance(each, Tensor)]
        if func.overloadpacket in PRODUCTS:
            self.matrix = max(each.numel() for each in (*read, made))
            return 2 * read[-2].numel() * read[-1].shape[-1], 0
        if not isinstance(made, Tensor) or not any(map(self._is_matrix, (made, *read))):
            return 0, 0
        is_view = made.untyped_storage()._cdata in {each.untyped_storage()._cdata for each in read}
        name = func.overloadpacket.__name__
        if (is_view and not func._schema.is_mutable) or "empty" in name:
            return 0, 0
        read = read[1:] if name in NOT_READ else read
        return 0, sum(each.nbytes for each in (made, *read) if self._is_matrix(each))

    def _is_matrix(self, tensor: Tensor) -> bool:
        """Return True for what is as large as the matrix at hand, or as the words that draw its dropout."""
        return 2 * tensor.numel() >= self.matrix

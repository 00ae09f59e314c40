"""Into how many chunks the collectives of linears are cut (--tp-comm-overlap). Read by times and memory of the plan, and by the linears."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.parallel import ParallelConfig


@dataclass(frozen=True)
class CommChunks:
    """Of a linear's all-gathers over tp, and of its reduce-scatters or all-reduces, where they run under the GEMM that they are for.
    1: whole."""

    gather: int = 1
    reduce: int = 1


WHOLE = CommChunks()


def comm_chunks(parallel: ParallelConfig) -> CommChunks:
    """As configured; without effect in a tp group of one."""
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size == 1:
        return WHOLE
    count = parallel.tp_comm_overlap_chunks
    return CommChunks(count if parallel.tp_comm_overlap_ag else 1, count if parallel.tp_comm_overlap_rs else 1)

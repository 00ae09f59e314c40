"""The options of a configuration that the tables of layers depend on."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.parallel import ParallelConfig
from megapipe.layers.packing import why_masked
from megapipe.layers.table import WHOLE, CommChunks, Documents, RankShape
from megapipe.sharding.state_dtypes import state_dtypes


def rank_shape(config: Config, tp: int, sequence_parallel: bool, micro_batch_size: int) -> RankShape:
    """Return the shape for a configuration's options on another grid or with another microbatch than its own."""
    data, is_cuda = config.data, config.training.device != "cpu"
    is_masked = why_masked(config, is_cuda) is not None
    has_borders = data.reset_attention_mask and not is_masked
    return RankShape(
        batch=micro_batch_size,
        seq=config.model.seq_length // config.parallel.context_parallel_size,
        dtype=config.precision.dtype,
        tp=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        recompute=config.recompute,
        documents=Documents(data.reset_position_ids, is_masked, data.masks_loss, has_borders),
        chunks=comm_chunks(config.parallel) if tp > 1 else WHOLE,
        attention_impl=config.kernels.attention_impl,
        transformer_impl=config.kernels.transformer_impl,
        compile_pointwise=config.kernels.compile_pointwise,
        loss_chunk=config.training.cross_entropy_chunk_size,
        fp8_blocks=config.precision.fp8_recipe == "blockwise",
        is_cuda=is_cuda,
        ep=config.parallel.expert_model_parallel_size,
        etp=config.parallel.expert_tensor_parallel_size or tp,
        gradient_dtype=state_dtypes(config.optimizer, config.precision).gradient,
        cp=config.parallel.context_parallel_size,
        cp_inner=(config.parallel.hierarchical_context_parallel_sizes or (1,))[0],
        in_parts=config.parallel.overlap_moe_expert_parallel_comm,
    )


def comm_chunks(parallel: ParallelConfig) -> CommChunks:
    """Return the chunks that --tp-comm-overlap asks for; one of each without it, and in a tp group of one rank."""
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size == 1:
        return WHOLE
    count = parallel.tp_comm_overlap_chunks
    return CommChunks(count if parallel.tp_comm_overlap_ag else 1, count if parallel.tp_comm_overlap_rs else 1)

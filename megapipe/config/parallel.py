"""The parallel section: how the model and the batch are laid over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, option

ASYNCHRONOUS_SCHEDULES = ("pipedream", "pipedream-2bw")
PIPELINE_SCHEDULES = (
    *("auto", "naive", "gpipe", "1f1b", "interleaved", "breadth-first"),
    *("zb-h1", "zb-h2", "zb-auto", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v"),
    *ASYNCHRONOUS_SCHEDULES,
)
PIPELINE_BALANCES = ("auto", "measured", "flops", "cost", "even")
DISTRIBUTED_BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class ParallelConfig:
    """Axis sizes, the cut of the layers into stages, the schedule, gradient buffers and overlap."""

    tensor_model_parallel_size: int = option(1, "tp: ranks that share every layer", unit="ranks", at_least=1)
    pipeline_model_parallel_size: int = option(1, "pp: ranks that share the layers in order", unit="ranks", at_least=1)
    context_parallel_size: int = option(1, "cp: ranks that share every sequence (1 for now)", unit="ranks", at_least=1)
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        "model chunks a pipeline rank holds (interleaving); 1: none",
        unit="chunks",
        at_least=1,
        derived="from the layers per chunk or the layout, else what the schedule takes",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "layers per chunk: another way to give the number of chunks", unit="layers", at_least=1
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "which layers each stage holds: E embedding, t layer, L loss, | stage border, *n and (...)*n repeat: 'Et*3|(tt|)*29,L'",
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers on the first pipeline rank; the rest is cut evenly", unit="layers", at_least=0
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers on the last pipeline rank; the rest is cut evenly", unit="layers", at_least=0
    )
    account_for_embedding_in_pipeline_split: bool = option(False, "the embedding counts as one layer in the cut")
    account_for_loss_in_pipeline_split: bool = option(False, "output layer and loss count as one layer in the cut")
    pipeline_balance: str = option(
        "auto",
        "how layers that are not placed by hand are cut: so that the busiest pipeline rank is least busy, by measured times or by FLOPs, "
        "with embedding and loss counted (auto: measured where --pipeline-layer-times is given); by FLOPs, each stage for itself (cost); "
        "or in equal numbers; see docs/balance.md",
        choices=PIPELINE_BALANCES,
    )
    pipeline_layer_times: str | None = option(
        None, "file of measured times of embedding, layers and head, written by megapipe profile-layers"
    )
    pipeline_rank_speeds: tuple[float, ...] | None = option(
        None,
        "how fast each pipeline rank computes, the fastest 1 (mixed GPUs: 1.0,0.6): slower ones get fewer layers; results stay the same",
        above=0,
        at_most=1,
    )
    pipeline_rank_memory: tuple[float, ...] | None = option(
        None,
        "memory that a pipeline rank may fill at the peak of a step, one number for all or one a rank: layers are cut so that it suffices",
        unit="GiB",
        above=0,
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None,
        "interleaving: microbatches a chunk takes in a row before the next chunk's turn; pipedream-2bw: microbatches of one update",
        unit="microbatches",
        at_least=1,
        derived="pp, where the schedule has groups",
    )
    pipeline_schedule: str = option(
        "auto",
        "order of forwards and backwards, see docs/schedules.md; auto: interleaved with more than one chunk, else 1f1b; pipedream, "
        "pipedream-2bw: NOT synchronous, they train something else than one process would",
        choices=PIPELINE_SCHEDULES,
    )
    pipeline_memory_limit: int | None = option(
        None,
        "zb-auto: microbatches whose activations a rank may keep at once, counted until their weight gradient is done",
        unit="microbatches",
        at_least=1,
        derived="pp with zb-auto",
    )
    pipeline_receive_depth: int = option(
        1, "receives posted ahead of the action that waits for them", unit="messages", at_least=1
    )
    sequence_parallel: bool = option(
        False, "norms and dropout work on 1/tp of the sequence; without tp it changes nothing"
    )
    tp_comm_overlap: bool = option(
        False,
        "cut the tensor-parallel collectives of a linear that have no other GEMM beside them into chunks, each under the GEMM of its "
        "neighbour: a forward's gather and reduction, the gather of a row-parallel linear's output gradient, see docs/gpu.md",
    )
    tp_comm_overlap_ag: bool = option(
        True,
        "with --tp-comm-overlap: all-gathers are cut",
        off_flag="--disable-tp-comm-overlap-ag",
        more_flags=(Flag("--no-tp-comm-overlap-ag", value=False, help="same as --disable-tp-comm-overlap-ag"),),
    )
    tp_comm_overlap_rs: bool = option(
        True,
        "with --tp-comm-overlap: reduce-scatters are cut, and without sequence parallelism all-reduces",
        off_flag="--disable-tp-comm-overlap-rs",
        more_flags=(Flag("--no-tp-comm-overlap-rs", value=False, help="same as --disable-tp-comm-overlap-rs"),),
    )
    tp_comm_overlap_chunks: int = option(4, "with --tp-comm-overlap: chunks of a collective", unit="chunks", at_least=2)
    use_distributed_optimizer: bool = option(
        False, "each data-parallel rank holds 1/dp of master weights and moments (ZeRO-1)"
    )
    overlap_grad_reduce: bool = option(False, "reduce gradients bucket by bucket under the remaining backward")
    overlap_param_gather: bool = option(False, "gather updated parameters bucket by bucket under the next forward")
    overlap_p2p_comm: bool = option(
        True,
        "stages send and receive while they compute",
        flag="--overlap-p2p-communication",
    )
    grad_reduce_in_bf16: bool = option(False, "reduce gradients over data-parallel ranks in bf16 instead of fp32")
    ddp_bucket_size: int | None = option(
        None,
        "parameters in one gradient bucket",
        unit="parameters",
        at_least=1,
        derived="max(40,000,000, 1,000,000 x dp)",
    )
    rank_order: str = option(
        "tp-cp-dp-pp",
        "axes from the fastest to the slowest changing one in the global rank",
        more_flags=(Flag("--use-tp-pp-dp-mapping", value="tp-cp-pp-dp", help="same as --rank-order tp-cp-pp-dp"),),
    )
    allow_tp_across_nodes: bool = option(False, "let a tensor-parallel group span nodes")
    distributed_backend: str = option(
        "auto", "communication library; auto: nccl on GPUs, gloo on CPUs", choices=DISTRIBUTED_BACKENDS
    )
    hang_timeout_seconds: float = option(
        120.0,
        "a rank that stands still for longer in one action or wait ends the run, with a report of who waits for whom; it has to be "
        "more than the longest action takes; five times as long in the first step, loading and saving; 0: no heartbeats, no watchdog",
        unit="seconds",
        at_least=0,
    )
    distributed_timeout_minutes: float = option(
        10.0, "a collective that waits longer than this ends the job", unit="minutes", above=0
    )

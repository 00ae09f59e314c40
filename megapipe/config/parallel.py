"""The parallel, recompute and offload sections: how model and batch are distributed, and which activations are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapipe.config.options import EXPERTS, Flag, Need, count, option

TP_OVERLAP = Need("parallel.tp_comm_overlap", "--tp-comm-overlap")
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED_GRADS = ("optim_grads", "optim_grads_params")
SHARDED_PARAMS = "optim_grads_params"
GRADS = Need(
    "parallel.data_parallel_sharding_strategy",
    "--data-parallel-sharding-strategy optim_grads or optim_grads_params",
    SHARDED_GRADS,
)
PARAMS = Need(
    "parallel.data_parallel_sharding_strategy", f"--data-parallel-sharding-strategy {SHARDED_PARAMS}", (SHARDED_PARAMS,)
)
CP = Need(
    "parallel.context_parallel_size",
    "--context-parallel-size N",
    above=1,
    without="every rank has whole sequences",
)
FULL = Need("recompute.recompute_granularity", "--recompute-granularity full", ("full",))
METHOD = replace(FULL, without="only full recompute reads it")
SELECTIVE = Need("recompute.recompute_granularity", "--recompute-granularity selective", ("selective",))
SLICES = Need("parallel.pipe_sp_splits", "--pipe-sp-splits N of at least 2", above=1)
OFFLOADING = Need("offload.cpu_offloading_num_layers", "--cpu-offloading-num-layers N")


@dataclass(frozen=True)
class ParallelConfig:
    """Axis sizes, partition of the layers into stages, pipeline schedule, gradient buffers, overlap and timeouts."""

    tensor_model_parallel_size: int = count(1, "tp: ranks that share every layer", "ranks")
    pipeline_model_parallel_size: int = count(
        1, "pp: ranks among which the layers are divided in order", "ranks", at_most=100_000
    )
    context_parallel_size: int = count(
        1, "cp: ranks that share every sequence, each with 1/cp of its tokens; see docs/long_context.md", "ranks"
    )
    cp_comm_type: tuple[str, ...] = option(
        ("p2p",),
        "how attention reaches the keys of other cp ranks, one for all layers or one for each: pass keys and values on "
        "in a ring under the computation (p2p); gather them (all_gather); exchange positions for heads (a2a); "
        "exchange heads within groups and pass keys on between them (a2a+p2p)",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        needs=CP,
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(
        None,
        "cp-comm-type a2a+p2p: ranks of a group that exchanges heads, and number of these groups, which form the ring",
        "ranks",
        at_least=1,
    )
    expert_model_parallel_size: int = count(
        1, "ep: ranks, of those of tp and dp, among which the experts of a layer are divided", "ranks", needs=EXPERTS
    )
    expert_tensor_parallel_size: int | None = count(
        None, "etp: ranks that share every expert", "ranks", derived="tensor-model-parallel-size", needs=EXPERTS
    )
    overlap_moe_expert_parallel_comm: bool = option(
        False,
        "run the all-to-alls of experts under computation: stages run in parts, and the parts of a forward and of the "
        "backward of another microbatch take turns (1f1b, interleaved, dualpipe, dualpipe-v); see "
        "docs/experts.md",
        needs=EXPERTS,
    )
    delay_wgrad_compute: bool = option(
        False,
        "with --overlap-moe-expert-parallel-comm: split backwards, and compute weight gradients under the all-to-all "
        "that follows their input gradients",
        needs=Need("parallel.overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm"),
    )
    num_virtual_stages_per_pipeline_rank: int | None = count(
        None,
        "model chunks a pipeline rank holds (interleaving); 1: none",
        "chunks",
        derived="from the layers per chunk or the layout, else what the schedule takes",
    )
    num_layers_per_virtual_pipeline_stage: int | None = count(
        None, "layers per chunk: another way to give the number of chunks", "layers"
    )
    pipeline_model_parallel_layout: str | None = option(
        None, "layers of each stage: E embedding, t layer, L loss, | border, *n and (...)*n repeat: 'Et*3|(tt|)*29,L'"
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers on the first pipeline rank; the rest is divided evenly", "layers", at_least=0
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers on the last pipeline rank; the rest is divided evenly", "layers", at_least=0
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False, "count the embedding as one layer when layers are divided"
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, "count output layer and loss as one layer when layers are divided"
    )
    pipeline_balance: str = option(
        "auto",
        "how layers that are not placed by hand are divided: to minimize the work of the busiest pipeline rank, by "
        "measured times or by FLOPs, with embedding and loss counted (auto: measured if --pipeline-layer-times is "
        "given); by FLOPs of each stage (cost); or in equal numbers; see docs/planner.md",
        choices=("auto", "measured", "flops", "cost", "even"),
    )
    pipeline_layer_times: str | None = option(
        None, "file with measured times of embedding, layers and head, written by megapipe profile-layers"
    )
    pipeline_rank_speeds: tuple[float, ...] | None = option(
        None,
        "relative speed of each pipeline rank, 1 for the fastest (mixed GPUs: 1.0,0.6): slower ones get fewer "
        "layers; results do not change",
        above=0,
        at_most=1,
    )
    pipeline_rank_memory: tuple[float, ...] | None = option(
        None,
        "memory that a pipeline rank may use at the peak of a step, one number for all ranks or one per rank: "
        "layers are divided so that it suffices",
        "GiB",
        above=0,
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = count(
        None,
        "interleaving: consecutive microbatches of a chunk before the next chunk's turn",
        "microbatches",
        derived="pp, where the schedule has groups",
    )
    pipeline_schedule: str = option(
        "auto",
        "order of forwards and backwards (`megapipe schedule --help`, docs/schedules.md); auto: "
        "interleaved with more than one chunk, else 1f1b; asynchronous ones never drain and update weights while "
        "microbatches are in flight, so that results differ from those of a single process",
    )
    pipe_sp_splits: int = count(
        1,
        "slices of every sequence, which take the place of microbatches in the pipeline (Seq1F1B): the idle time is "
        "divided by their number, and fewer activations are held, also with one microbatch (1f1b, interleaved, zb-h1, "
        "zb-v); see docs/long_context.md",
        "slices",
    )
    pipe_sp_strategy: str = option(
        "uniform_comp",
        "how --pipe-sp-splits cuts sequences: into slices of equal cost, of which later ones are shorter, since they "
        "attend to more keys (uniform_comp), or of equal length (average)",
        choices=("uniform_comp", "average"),
        needs=SLICES,
    )
    pipeline_memory_limit: int | None = count(
        None,
        "zb-auto: microbatches whose activations a rank may hold at the same time, until their weight "
        "gradients are computed",
        "microbatches",
        derived="pp with zb-auto",
    )
    pipeline_receive_depth: int | None = count(
        None,
        "computations a receive is posted ahead of the one that waits for it",
        "computations",
        derived="4 with --device cpu, where a posted receive costs only memory, else 1",
    )
    sequence_parallel: bool = option(False, "norms and dropout work on 1/tp of the sequence; no effect without tp")
    tp_comm_overlap: bool | None = option(
        None,
        "split the tensor-parallel collectives of a linear that no other GEMM can hide into chunks, each overlapped "
        "with the GEMM of the chunk before: a forward's all-gather and reduction, the all-gather of a row-parallel "
        "linear's output gradient; see docs/gpu.md",
        derived="on from tp 4 with --sequence-parallel and --transformer-impl local on GPUs, else off",
    )
    tp_comm_overlap_ag: bool = option(
        True,
        "with --tp-comm-overlap: split all-gathers",
        off_flag="--disable-tp-comm-overlap-ag",
        more_flags=(Flag("--no-tp-comm-overlap-ag", False),),
    )
    tp_comm_overlap_rs: bool = option(
        True,
        "with --tp-comm-overlap: split reduce-scatters, and without sequence parallelism all-reduces",
        off_flag="--disable-tp-comm-overlap-rs",
        more_flags=(Flag("--no-tp-comm-overlap-rs", False),),
    )
    tp_comm_overlap_chunks: int = option(
        4, "with --tp-comm-overlap: chunks of a collective", "chunks", at_least=2, needs=TP_OVERLAP
    )
    use_distributed_optimizer: bool = option(False, "shard master weights and moments over the dp ranks (ZeRO-1)")
    data_parallel_sharding_strategy: str | None = option(
        None,
        "what the dp ranks shard: nothing (no_shard); master weights and moments (optim, ZeRO-1); gradients too "
        "(optim_grads, ZeRO-2); weights too (optim_grads_params, ZeRO-3 or FSDP); see docs/memory.md",
        choices=SHARDING_STRATEGIES,
        derived="optim with --use-distributed-optimizer, else no_shard",
        more_flags=(
            Flag(
                "--use-megatron-fsdp",
                SHARDED_PARAMS,
                only_from=(None,),
                help="same as --data-parallel-sharding-strategy optim_grads_params, unless another strategy is given",
            ),
        ),
    )
    num_distributed_optimizer_instances: int = count(
        1,
        "groups into which the ranks with the same parameters are divided: each shards them anew, and gradients of a "
        "shard are summed over the groups (HSDP)",
        "groups",
    )
    data_parallel_sharding_granularity: str = option(
        "run",
        "how long a stage's weights stay gathered and its gradients are summed before they are reduced: for one "
        "microbatch, for consecutive microbatches of the stage (run), or for the step",
        choices=("microbatch", "run", "step"),
        needs=GRADS,
    )
    data_parallel_sharding_prefetch: int = option(
        1, "computations by which a gather of weights precedes its use", "computations", at_least=0, needs=PARAMS
    )
    data_parallel_sharding_units: int = count(
        1,
        "groups of layers of every stage that are gathered, freed and reduced one by one, at most one a layer",
        "groups",
        needs=GRADS,
    )
    overlap_grad_reduce: bool = option(False, "reduce gradients asynchronously, bucket by bucket during the backward")
    overlap_param_gather: bool = option(
        False, "gather parameters asynchronously: updated ones bucket by bucket during the next forward"
    )
    overlap_p2p_comm: bool = option(
        True, "overlap sends and receives of stages with computation", flag="--overlap-p2p-communication"
    )
    grad_reduce_in_bf16: bool = option(False, "reduce gradients over data-parallel ranks in bf16 instead of fp32")
    ddp_bucket_size: int | None = count(
        None, "parameters in one gradient bucket", "parameters", derived="max(40,000,000, 1,000,000 x dp)"
    )
    rank_order: str = option(
        "tp-cp-dp-pp", "global rank's axes, fastest first", more_flags=(Flag("--use-tp-pp-dp-mapping", "tp-cp-pp-dp"),)
    )
    allow_tp_across_nodes: bool = option(False, "allow a tensor-parallel group to span nodes")
    allow_mixed_hosts: bool = option(
        False, "allow ranks on different kinds of GPU, whose kernels round differently; else they are refused"
    )
    distributed_backend: str = option(
        "auto", "communication library; auto: nccl on GPUs, gloo on CPUs", choices=("auto", "gloo", "nccl")
    )
    hang_timeout_seconds: float = option(
        120.0,
        "end the run if a rank makes no progress for this long, with a report of which rank waits for which; must "
        "be longer than the longest action; five times as long in the first step, loading and saving; 0: no "
        "heartbeats, no watchdog",
        "seconds",
        at_least=0,
    )
    distributed_timeout_minutes: float = option(10.0, "a collective that waits longer ends the job", "minutes", above=0)


def strategy_of(parallel: ParallelConfig) -> str:
    """Return what is sharded over data-parallel ranks: one of SHARDING_STRATEGIES."""
    given = parallel.data_parallel_sharding_strategy
    return given or ("optim" if parallel.use_distributed_optimizer else "no_shard")


@dataclass(frozen=True)
class RecomputeConfig:
    """Recomputation in the backward: none, some modules of every layer (selective) or whole layers (full)."""

    recompute_granularity: str | None = option(
        None,
        "what is recomputed in the backward: some modules of every layer, or whole layers; unset: nothing",
        choices=("selective", "full"),
        more_flags=(
            Flag("--recompute-activations", "selective"),
            Flag(
                "--checkpoint-activations",
                "full",
                or_else=(("recompute_method", "uniform"), ("recompute_num_layers", 1)),
                help="each layer as a whole, as in old versions of Megatron",
            ),
        ),
    )
    recompute_method: str | None = option(
        None,
        "full: uniform keeps the input of every group of N layers; block recomputes the first N layers of each chunk",
        choices=("uniform", "block"),
        needs=METHOD,
        more_flags=(
            Flag(
                "--activations-checkpoint-method",
                also_sets=(("recompute_granularity", "full"),),
                or_else=(("recompute_num_layers", 1),),
                help="full recomputation by this method, as in old versions of Megatron",
            ),
        ),
    )
    recompute_num_layers: int | None = count(
        None,
        "full: N of the method",
        "layers",
        needs=METHOD,
        more_flags=(Flag("--activations-checkpoint-num-layers"),),
    )
    recompute_keep_attention: bool = option(
        False, "full: keep a fused attention kernel's results, so that the backward does not run it again", needs=FULL
    )
    recompute_in_bubbles: bool = option(
        False,
        "replay checkpointed layers while the rank waits for a gradient, ahead of the backward (RECOMPUTE in the "
        "schedule): a shorter step, for the memory of what a stage computes again for one microbatch; see "
        "docs/memory.md",
        needs=FULL,
    )
    recompute_modules: tuple[str, ...] = option(
        ("core_attn",),
        "selective: modules that are recomputed",
        choices=("core_attn", "layernorm", "mla_up_proj", "mlp", "activation", "moe", "moe_act", "shared_experts"),
        needs=SELECTIVE,
        more_flags=(
            Flag(
                "--moe-layer-recompute",
                ("core_attn", "moe"),
                also_sets=(("recompute_granularity", "selective"),),
                help="layers of experts and core attention, as in old versions of Megatron",
            ),
        ),
    )
    recompute_memory_budget: float | None = option(
        None,
        "in place of the other recompute options: share of the activation memory that full recompute would save and "
        "that is kept instead; each layer recomputes what saves the most bytes per FLOP: 1 keeps everything, 0 only "
        "what full recompute keeps; see docs/memory.md",
        at_least=0,
        at_most=1,
    )

    @property
    def of_predictions(self) -> RecomputeConfig:
        """The recompute of the layers of multi-token prediction: with full recompute each is a checkpoint of its own,
        unless the method is block, by which only first layers of a stage are. --recompute-memory-budget keeps them.
        """
        if self.recompute_memory_budget is not None or self.recompute_method == "block":
            return RecomputeConfig()
        return self if self.recompute_granularity != "full" else replace(self, recompute_num_layers=1)


@dataclass(frozen=True)
class OffloadConfig:
    """Activations copied to host memory after their forward and back before their backward; never parameters."""

    cpu_offloading_num_layers: int = option(
        0, "first layers of each stage whose activations are kept in host memory", "layers", at_least=0
    )
    min_offloaded_tensor_size: int = count(1048576, "smaller tensors stay on the device", "elements", needs=OFFLOADING)

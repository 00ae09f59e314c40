"""Rules between configuration fields: each is broken once, with a helpful message, and accepts nearby values."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import rules
from megapipe.config.config import Config, all_fields
from megapipe.config.files import parse_blend, split_shares
from megapipe.config.load import load_config
from megapipe.config.problems import divisors, nearest_values, use_divisors, use_multiples
from megapipe.config.rules.check import check
from megapipe.config.rules.training import job as job_rule
from megapipe.errors import ConfigError
from tests.config.examples import SHAPE, job

SAMPLES = SHAPE + " --micro-batch-size 2 --lr 1e-3 --train-samples 1000 --mock-data --vocab-size 9"
LATENT = "--multi-latent-attention --position-embedding-type rope"
GRAPHS = "--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0"

# (rule, flags that break it, words of the message, similar flags that are valid)
CASES = [
    (
        "conversations_are_not_generated",
        "--sft --tokenizer-type HuggingFaceTokenizer --tokenizer-model folder",
        ["--mock-data generates tokens, but --sft trains on conversations"],
        "--no-sft",
    ),
    (
        "conversations_need_a_tokenizer",
        "--sft",
        ["--sft needs a tokenizer.json", "but no --tokenizer-type is given"],
        "--no-sft",
    ),
    ("conversations_are_asked_for", "--sft-overlong drop", ["needs --sft, supervised finetuning;"], "--no-sft"),
    (
        "heads_divide_hidden",
        "--hidden-size 60",
        ["--num-attention-heads 8 does not divide --hidden-size 60", "use 56 or 64 as hidden size"],
        "--hidden-size 60 --kv-channels 8",
    ),
    (
        "groups_divide_heads",
        "--group-query-attention --num-query-groups 3",
        ["--num-query-groups 3 does not divide --num-attention-heads 8; use 1, 2, 4 or 8"],
        "--group-query-attention --num-query-groups 2",
    ),
    (
        "fewer_heads_than_ranks_that_share_and_exchange_them",
        "--num-attention-heads 2 --tensor-model-parallel-size 4 --context-parallel-size 2 --cp-comm-type a2a",
        ["--tensor-model-parallel-size 4 does not divide --num-attention-heads 2; use 1 or 2"],
        "--num-attention-heads 8 --tensor-model-parallel-size 4 --context-parallel-size 2 --cp-comm-type a2a",
    ),
    (
        "tp_divides_heads",
        "--tensor-model-parallel-size 3",
        ["--tensor-model-parallel-size 3 does not divide --num-attention-heads 8; use 1, 2, 4 or 8"],
        "--tensor-model-parallel-size 4",
    ),
    (
        "each_kind_of_layer_obeys",
        "--layer-pattern '1 num_query_groups=3' 1 ...",
        ["layers 0, 2: --num-query-groups 3 does not divide --num-attention-heads 8; use 1, 2, 4 or 8"],
        "--layer-pattern '1 num_query_groups=4' 1 ...",
    ),
    (
        "layers_fit",
        "--layer-pattern '1 window_size=8' 1 1",
        ["--layer-pattern describes 3 layers, --num-layers is 4; repeat the runs with a last word '...'"],
        "--layer-pattern '1 window_size=8' 1 1 ...",
    ),
    (
        "layers_fit",
        "--position-embedding-type rope --no-rope-freq 3",
        ["--no-rope-freq 3 does not divide --num-layers 4; use 2 or 4, or write a list"],
        "--position-embedding-type rope --no-rope-freq 4",
    ),
    ("frequencies_have_their_option", "--window-attn-skip-freq 2", ["needs --window-size"], "--window-size 4"),
    (
        "steps_have_their_scale",
        "--nope-query-scale-length 2 --position-embedding-type none",
        ["needs --nope-query-scale"],
        "--nope-query-scale-length 2 --position-embedding-type none --nope-query-scale 0.1",
    ),
    (
        "frequencies_have_their_option",
        "--no-rope-freq 2",
        ["needs --position-embedding-type rope"],
        "--no-rope-freq 2 --position-embedding-type rope",
    ),
    (
        "some_layer_keeps_an_option",
        "--num-experts 4 --moe-layer-freq [0]*4",
        ["--moe-layer-freq [0]*4 leaves no layer with --num-experts 4; give --num-experts none, or let some"],
        "--num-experts 4 --moe-layer-freq [0]*3+[1]",
    ),
    (
        "some_layer_keeps_an_option",
        "--window-size 4 --window-attn-skip-freq 1",
        ["--window-attn-skip-freq 1 leaves no layer with --window-size 4; give --window-size none"],
        "--window-size 4 --window-attn-skip-freq 2",
    ),
    (
        "some_layer_keeps_an_option",
        "--position-embedding-type rope --no-rope-freq [1]*4",
        ["leaves no layer with --position-embedding-type rope; give --position-embedding-type none"],
        "--position-embedding-type rope --no-rope-freq [1]*3+[0]",
    ),
    (
        "a_tokenizer_reads_its_files_only",
        "--tokenizer-type ByteTokenizer --tokenizer-model folder",
        ["--tokenizer-type ByteTokenizer does not read --tokenizer-model; leave it out"],
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model folder",
    ),
    ("spikes_are_watched", "--spike-window 10", ["--spike-window 10 needs --spike-rollback N"], "--spike-window 100"),
    (
        "slices_are_cut",
        "--pipe-sp-strategy average",
        ["--pipe-sp-strategy average needs --pipe-sp-splits N of at least 2"],
        "--pipe-sp-strategy uniform_comp",
    ),
    (
        "slices_have_a_token",
        "--pipeline-model-parallel-size 2 --pipe-sp-splits 33 --hidden-dropout 0 --attention-dropout 0",
        ["--pipe-sp-splits 33: --seq-length 32 has at most 32 slices; use 32 or fewer"],
        "--pipeline-model-parallel-size 2 --pipe-sp-splits 32 --hidden-dropout 0 --attention-dropout 0",
    ),
    (
        "slices_without_dropout",
        "--pipeline-model-parallel-size 2 --pipe-sp-splits 2 --hidden-dropout 0.1",
        ["--pipe-sp-splits 2 with --hidden-dropout 0.1 and --attention-dropout 0.1: masks would depend on the number"],
        "--pipeline-model-parallel-size 2 --pipe-sp-splits 2 --hidden-dropout 0 --attention-dropout 0",
    ),
    (
        "only_wsd_has_a_last_phase",
        "--lr-wsd-decay-style cosine",
        ["--lr-wsd-decay-style cosine needs --lr-decay-style WSD"],
        "--lr-wsd-decay-style exponential",
    ),
    (
        "layers_in_bf16_are_asked_for",
        "--num-layers-at-start-in-bf16 2",
        ["--num-layers-at-start-in-bf16 2 needs --first-last-layers-bf16"],
        "--num-layers-at-start-in-bf16 1",
    ),
    (
        "norms_of_projections",
        "--qk-layernorm-scope projection",
        ["needs --qk-layernorm;"],
        "--qk-layernorm-scope projection --qk-layernorm --normalization RMSNorm",
    ),
    (
        "norms_of_projections",
        "--qk-layernorm-scope projection --qk-layernorm",
        ["--qk-layernorm-scope projection is an RMSNorm, not LayerNorm; add --normalization RMSNorm"],
        "--qk-layernorm",
    ),
    (
        "each_kind_of_layer_has_a_kernel",
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --attention-dropout 0 "
            "--recompute-keep-attention --layer-pattern '1 attn_logit_softcapping=9' 1 ..."
        ),
        ["not fused with --attn-logit-softcapping"],
        "--recompute-activations --layer-pattern '1 attn_logit_softcapping=9' 1 ...",
    ),
    (
        "feed_forward_positive",
        "--hidden-size 16 --swiglu",
        ["--hidden-size 16", "give --ffn-hidden-size"],
        "--hidden-size 16 --swiglu --ffn-hidden-size 40",
    ),
    (
        "tp_divides_feed_forward",
        "--tensor-model-parallel-size 4 --ffn-hidden-size 102",
        ["does not divide --ffn-hidden-size 102", "use 100 or 104 as ffn hidden size"],
        "--tensor-model-parallel-size 4 --ffn-hidden-size 104",
    ),
    (
        "tp_divides_sequence",
        "--tensor-model-parallel-size 4 --seq-length 30 --sequence-parallel",
        ["--tensor-model-parallel-size 4 does not divide --seq-length 30", "use 28 or 32 as sequence length"],
        "--tensor-model-parallel-size 4 --seq-length 30",
    ),
    (
        "collective_chunks_are_used",
        "--tp-comm-overlap-chunks 3",
        ["--tp-comm-overlap-chunks 3", "needs --tp-comm-overlap;"],
        "--tp-comm-overlap-chunks 3 --tp-comm-overlap",
    ),
    (
        "collective_chunks_fit_sequence",
        "--tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-chunks 5",
        ["--tp-comm-overlap-chunks 5 is more than", "4 positions", "use at most 4"],
        "--tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap",
    ),
    (
        "positions_cover_sequence",
        "--max-position-embeddings 31",
        ["31", "--seq-length 32"],
        "--max-position-embeddings 32",
    ),
    (
        "rotary_width_even",
        "--position-embedding-type rope --kv-channels 10 --rotary-percent 0.5",
        ["pairs", "is 5"],
        "--position-embedding-type rope --kv-channels 8 --rotary-percent 0.5",
    ),
    (
        "growing_queries_need_layers_without_positions",
        "--nope-query-scale 0.1 --position-embedding-type rope",
        ["--nope-query-scale 0.1 scales queries of layers without positions, which no layer is; give --no-rope-freq"],
        "--nope-query-scale 0.1 --position-embedding-type rope --no-rope-freq 2",
    ),
    (
        "rope_scaling_needs_rope",
        "--use-rope-scaling",
        ["--rope-scaling-type llama3", "learned_absolute"],
        "--use-rope-scaling --position-embedding-type rope",
    ),
    (
        "rope_bands_ordered",
        "--position-embedding-type rope --use-rope-scaling --rope-high-freq-factor 1",
        ["--rope-high-freq-factor 1", "Llama 3 uses 4 and 1"],
        "--position-embedding-type rope --rope-high-freq-factor 1",
    ),
    (
        "rope_scaling_needs_rope",
        "--use-rope-scaling",
        ["--rope-scaling-type llama3 scales rotary positions"],
        "--use-rope-scaling --position-embedding-type rope --no-rope-freq 2",
    ),
    (
        "yarn_bands_ordered",
        "--position-embedding-type rope --layer-pattern '1 rope_scaling_type=yarn' 1 ... --yarn-beta-fast 1",
        ["layers 0, 2: --yarn-beta-fast 1 must be above --yarn-beta-slow 1"],
        "--position-embedding-type rope --layer-pattern '1 rope_scaling_type=linear' 1 ... --yarn-beta-fast 1",
    ),
    (
        "yarn_temperature_is_whole",
        "--position-embedding-type rope --rope-scaling-type yarn --yarn-mscale 0.7",
        ["--yarn-mscale 0.7", "together with --yarn-mscale-all-dim"],
        "--position-embedding-type rope --rope-scaling-type yarn --yarn-mscale 0.7 --yarn-mscale-all-dim 0.7",
    ),
    (
        "padded_vocabulary_fits",
        "--padded-vocab-size 99",
        ["--padded-vocab-size 99 is below --vocab-size 100"],
        "--padded-vocab-size 100",
    ),
    (
        "two_chunks_for_each_context_parallel_rank",
        "--context-parallel-size 3 --seq-length 32",
        ["--seq-length 32 is not a multiple of 2 x --context-parallel-size 3", "use 30 or 36"],
        "--context-parallel-size 3 --seq-length 36",
    ),
    (
        "kinds_of_context_parallelism_for_layers",
        "--context-parallel-size 2 --cp-comm-type a2a p2p a2a p2p a2a",
        ["--cp-comm-type names 5 kinds; name one, or one for each of"],
        "--context-parallel-size 2 --cp-comm-type a2a",
    ),
    (
        "levels_of_context_parallelism",
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 3",
        ["two numbers whose product is --context-parallel-size 4; use 1 4, 2 2 or 4 1"],
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    ),
    (
        "levels_of_context_parallelism_are_given",
        "--context-parallel-size 4 --cp-comm-type a2a+p2p",
        ["--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A R"],
        "--context-parallel-size 4 --cp-comm-type p2p",
    ),
    (
        "levels_belong_to_their_kind",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        ["--hierarchical-context-parallel-sizes belongs to --cp-comm-type a2a+p2p"],
        "--context-parallel-size 4",
    ),
    (
        "context_parallelism_without_compiled_functions",
        "--context-parallel-size 2 --compile-pointwise",
        ["--context-parallel-size 2 does not work with --compile-pointwise yet"],
        "--compile-pointwise",
    ),
    (
        "heads_for_positions",
        "--context-parallel-size 3 --seq-length 36 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
        [
            "divides heads over 3 ranks",
            "a rank has 8 heads, and 2 key/value heads: use 1, 2, 4 or 8, or --cp-comm-type p2p",
        ],
        "--context-parallel-size 4 --seq-length 32 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
    ),
    (
        "heads_for_positions_and_for_more_tensor_ranks",
        "--context-parallel-size 2 --seq-length 32 --cp-comm-type a2a --tensor-model-parallel-size 16",
        ["--tensor-model-parallel-size 16 does not divide --num-attention-heads 8; use 1, 2, 4 or 8"],
        "--context-parallel-size 2 --seq-length 32 --cp-comm-type a2a --tensor-model-parallel-size 4",
    ),
    (
        "rank_order_names_axes",
        "--rank-order tp-dp-pp",
        ["--rank-order tp-dp-pp", "tp, cp, dp or pp"],
        "--rank-order pp-dp-cp-tp",
    ),
    (
        "chunks_given_once",
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--num-layers-per-virtual-pipeline-stage 1"
        ),
        ["give one of the two"],
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    (
        "interleaving_needs_pipeline",
        "--num-virtual-stages-per-pipeline-rank 2",
        ["needs --pipeline-model-parallel-size of at least 2"],
        "--num-virtual-stages-per-pipeline-rank 1",
    ),
    (
        "layers_placed_once",
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL "
            "--decoder-first-pipeline-num-layers 1"
        ),
        ["leave --decoder-first-pipeline-num-layers out"],
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL",
    ),
    (
        "end_layers_fit",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
        ["given 2 layers", "--num-layers 4"],
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
    ),
    (
        "parameter_gather_needs_distributed_optimizer",
        "--overlap-param-gather",
        ["needs --use-distributed-optimizer"],
        "--overlap-param-gather --use-distributed-optimizer",
    ),
    (
        "backend_fits_device",
        "--device cpu --distributed-backend nccl",
        ["use gloo or auto"],
        "--device cpu --distributed-backend gloo",
    ),
    ("bf16_reduction_keeps_fp64", "--fp64 --grad-reduce-in-bf16", ["--dtype fp64"], "--bf16 --grad-reduce-in-bf16"),
    (
        "recompute_is_whole",
        "--recompute-granularity full --recompute-method uniform",
        ["needs --recompute-num-layers N"],
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    (
        "recompute_is_whole",
        "--recompute-granularity selective --recompute-num-layers 1",
        ["--recompute-num-layers 1 belongs to --recompute-granularity full"],
        "--recompute-granularity selective",
    ),
    (
        "recompute_modules_fit",
        "--recompute-modules mlp",
        ["selective"],
        "--recompute-activations --recompute-modules mlp layernorm",
    ),
    (
        "recompute_modules_fit",
        "--recompute-activations --recompute-modules mlp activation",
        ["leave activation out"],
        "--recompute-modules core_attn",
    ),
    (
        "kept_attention_has_a_kernel",
        "--recompute-keep-attention",
        ["needs --recompute-granularity full"],
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
            "--attention-dropout 0 --recompute-keep-attention"
        ),
    ),
    (
        "kept_attention_has_a_kernel",
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
            "--attention-dropout 0.1 --recompute-keep-attention"
        ),
        ["not fused with --attention-dropout above 0"],
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --attention-dropout 0 "
            "--recompute-keep-attention"
        ),
    ),
    (
        "latents_are_projected_up_again_up_to_a_fused_kernel",
        "--recompute-activations --recompute-modules mla_up_proj",
        ["mla_up_proj recomputes nothing: attention has no latents; add --multi-latent-attention"],
        f"{LATENT} --attention-dropout 0 --recompute-activations --recompute-modules mla_up_proj",
    ),
    (
        "latents_are_projected_up_again_up_to_a_fused_kernel",
        f"{LATENT} --attention-dropout 0.1 --recompute-activations --recompute-modules mla_up_proj",
        ["mla_up_proj without core_attn keeps", "not fused with --attention-dropout above 0; add core_attn"],
        f"{LATENT} --attention-dropout 0.1 --recompute-activations --recompute-modules mla_up_proj core_attn",
    ),
    (
        "offloaded_layers_are_whole_checkpoints",
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
            "--cpu-offloading-num-layers 3"
        ),
        ["use a multiple of 2"],
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
            "--cpu-offloading-num-layers 2"
        ),
    ),
    (
        "experts_are_chosen_among_experts",
        "--moe-router-topk 4",
        ["--moe-router-topk 4 needs --num-experts N"],
        "--moe-router-topk 4 --num-experts 8 --disable-bias-linear",
    ),
    (
        "shared_experts_have_a_gate",
        "--num-experts 4 --moe-shared-expert-gate --disable-bias-linear",
        ["needs --moe-shared-expert-intermediate-size N"],
        "--num-experts 4 --moe-shared-expert-gate --moe-shared-expert-intermediate-size 64 --disable-bias-linear",
    ),
    (
        "one_strategy_of_sharding",
        "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
        ["no_shard contradicts --use-distributed-optimizer"],
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
    ),
    (
        "only_sharded_parameters_are_gathered",
        "--overlap-param-gather",
        ["--overlap-param-gather needs --use-distributed-optimizer or --data-parallel-sharding-strategy optim"],
        "--overlap-param-gather --data-parallel-sharding-strategy optim",
    ),
    (
        "instances_of_what_is_sharded",
        "--num-distributed-optimizer-instances 2",
        ["--num-distributed-optimizer-instances 2 needs --use-distributed-optimizer"],
        "--num-distributed-optimizer-instances 2 --use-distributed-optimizer",
    ),
    (
        "units_of_what_is_gathered_or_reduced",
        "--data-parallel-sharding-strategy optim --data-parallel-sharding-units 2",
        ["needs --data-parallel-sharding-strategy optim_grads or optim_grads_params"],
        "--data-parallel-sharding-strategy optim_grads --data-parallel-sharding-units 2",
    ),
    (
        "units_are_parts_of_stages",
        "--data-parallel-sharding-strategy optim_grads --data-parallel-sharding-units 2 --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 1",
        ["--data-parallel-sharding-units 2 does not work with --recompute-method block yet"],
        "--data-parallel-sharding-strategy optim_grads --data-parallel-sharding-units 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    (
        "prefetch_of_what_is_gathered",
        "--data-parallel-sharding-strategy optim_grads --data-parallel-sharding-prefetch 2",
        ["needs --data-parallel-sharding-strategy optim_grads_params"],
        "--data-parallel-sharding-strategy optim_grads_params --data-parallel-sharding-prefetch 2",
    ),
    (
        "weight_gradients_are_delayed_under_all_to_alls",
        "--num-experts 4 --disable-bias-linear --delay-wgrad-compute",
        ["--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm"],
        "--num-experts 4 --disable-bias-linear --delay-wgrad-compute --overlap-moe-expert-parallel-comm "
        "--expert-model-parallel-size 2",
    ),
    (
        "groups_are_taken_of_groups",
        "--num-experts 4 --moe-router-group-topk 2 --disable-bias-linear",
        ["needs --moe-router-num-groups N"],
        "--num-experts 4 --moe-router-group-topk 2 --moe-router-num-groups 4 --disable-bias-linear",
    ),
    (
        "results_are_added_in_a_node_by_flex",
        "--num-experts 4 --moe-combine-in-node --disable-bias-linear",
        ["--moe-combine-in-node needs --moe-token-dispatcher-type flex"],
        "--num-experts 4 --moe-combine-in-node --moe-token-dispatcher-type flex --disable-bias-linear",
    ),
    (
        "rows_are_dropped_beyond_a_capacity",
        "--num-experts 4 --moe-token-drop-policy position --disable-bias-linear",
        ["needs --moe-expert-capacity-factor"],
        "--num-experts 4 --moe-token-drop-policy position --moe-expert-capacity-factor 1.5 --disable-bias-linear",
    ),
    (
        "latent_attention_has_sizes",
        "--kv-lora-rank 64",
        ["--kv-lora-rank 64 needs --multi-latent-attention"],
        "--kv-lora-rank 64 --multi-latent-attention --position-embedding-type rope",
    ),
    (
        "latent_attention_is_rotary",
        "--multi-latent-attention",
        ["--multi-latent-attention rotates all channels", "--position-embedding-type rope"],
        "--multi-latent-attention --position-embedding-type rope",
    ),
    (
        "latents_are_normed_before_there_are_heads",
        "--multi-latent-attention --position-embedding-type rope --qk-layernorm --qk-layernorm-after-rope",
        ["--qk-layernorm-after-rope with --multi-latent-attention"],
        "--multi-latent-attention --position-embedding-type rope --qk-layernorm",
    ),
    (
        "queries_are_scaled_by_the_length_of_yarn",
        "--multi-latent-attention --position-embedding-type rope --yarn-query-scale 0.1",
        ["--yarn-query-scale 0.1 needs --rope-scaling-type yarn"],
        "--multi-latent-attention --position-embedding-type rope --yarn-query-scale 0.1 --rope-scaling-type yarn",
    ),
    (
        "latent_attention_rotates_pairs",
        "--multi-latent-attention --position-embedding-type rope --qk-pos-emb-head-dim 31",
        ["--qk-pos-emb-head-dim 31 is odd", "use 32"],
        "--multi-latent-attention --position-embedding-type rope --qk-pos-emb-head-dim 32",
    ),
    (
        "latent_attention_has_no_query_groups",
        "--multi-latent-attention --position-embedding-type rope --group-query-attention --num-query-groups 1",
        ["--num-query-groups 1", "has its own keys and values"],
        "--multi-latent-attention --position-embedding-type rope",
    ),
    (
        "values_are_at_most_as_wide_as_keys",
        "--multi-latent-attention --position-embedding-type rope --v-head-dim 256",
        ["--v-head-dim 256 is above the 192 channels"],
        "--multi-latent-attention --position-embedding-type rope --v-head-dim 192",
    ),
    (
        "layers_share_latent_attention",
        "--multi-latent-attention --position-embedding-type rope --layer-pattern '1 rotary_base=500' 1 ...",
        ["layers cannot differ in rotary_base"],
        "--multi-latent-attention --position-embedding-type rope --layer-pattern '1 window_size=8' 1 ...",
    ),
    (
        "coefficients_of_muon_take_turns",
        "--optimizer muon --muon-num-ns-steps 7",
        ["--muon-num-ns-steps 7", "such as 5"],
        "--optimizer muon --muon-num-ns-steps 7 --muon-coefficient-type simple",
    ),
    (
        "blockwise_is_another_optimizer",
        "--optimizer muon --muon-tp-mode blockwise",
        ["results change with tp", "duplicated or distributed"],
        "--optimizer muon --muon-tp-mode distributed",
    ),
    (
        "muon_on_several_tp_ranks_names_its_mode",
        "--optimizer muon --tensor-model-parallel-size 2",
        ["needs --muon-tp-mode duplicated"],
        "--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode duplicated",
    ),
    (
        "muon_is_torchs",
        "--optimizer muon --optimizer-impl apex",
        ["--optimizer-impl apex has no rules over matrices, such as muon"],
        "--optimizer muon",
    ),
    (
        "clamps_are_of_gates",
        "--activation-func-clamp-value 7 --activation relu",
        ["--activation-func-clamp-value has no effect on --activation relu"],
        "--activation-func-clamp-value 7 --activation swiglu",
    ),
    (
        "biases_of_experts_have_a_rate",
        "--num-experts 4 --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1",
        ["needs --moe-router-enable-expert-bias"],
        "--num-experts 4 --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1 "
        "--moe-router-enable-expert-bias --disable-bias-linear",
    ),
    (
        "weights_of_a_softmax_are_normalized_by_another_flag",
        "--num-experts 4 --no-moe-router-norm-topk-prob --disable-bias-linear",
        ["--no-moe-router-norm-topk-prob belongs to --moe-router-score-function sigmoid"],
        "--num-experts 4 --no-moe-router-norm-topk-prob --moe-router-score-function sigmoid --disable-bias-linear",
    ),
    (
        "a_group_has_the_experts_of_its_score",
        "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-score-topk 3 "
        "--disable-bias-linear",
        ["--moe-router-group-score-topk 3: a group has 2 experts"],
        "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-score-topk 2 "
        "--disable-bias-linear",
    ),
    (
        "tokens_ahead_are_within_the_sequence",
        "--position-embedding-type rope --mtp-num-layers 8 --seq-length 8",
        ["--mtp-num-layers 8", "use less than 8"],
        "--position-embedding-type rope --mtp-num-layers 7 --seq-length 8",
    ),
    (
        "a_factor_needs_modules",
        "--mtp-loss-scaling-factor 0.3",
        ["--mtp-loss-scaling-factor", "--mtp-num-layers N"],
        "--mtp-loss-scaling-factor 0.3 --mtp-num-layers 1 --position-embedding-type none",
    ),
    (
        "learned_positions_are_of_other_tokens",
        "--mtp-num-layers 1 --position-embedding-type learned_absolute",
        ["--mtp-num-layers 1 with --position-embedding-type learned_absolute", "use rope or none"],
        "--mtp-num-layers 1 --position-embedding-type none",
    ),
    (
        "offloaded_size_needs_layers",
        "--min-offloaded-tensor-size 5",
        ["needs --cpu-offloading-num-layers"],
        "--min-offloaded-tensor-size 5 --cpu-offloading-num-layers 1",
    ),
    (
        "micro_divides_global",
        "--global-batch-size 9",
        ["--micro-batch-size 2 does not divide --global-batch-size 9; use 8 or 10"],
        "--global-batch-size 8",
    ),
    ("one_measure_of_length", "--train-samples 10", ["--train-iters and --train-samples"], ""),
    ("one_measure_of_length", "--lr-decay-samples 10", ["--lr-decay-samples count in samples"], "--lr-decay-iters 10"),
    ("one_warmup", "--lr-warmup-iters 2 --lr-warmup-fraction 0.1", ["give one of them"], "--lr-warmup-fraction 0.1"),
    (
        "warmup_within_decay",
        "--lr-warmup-iters 100",
        ["--lr-warmup-iters 100 must end before --train-iters 100"],
        "--lr-warmup-iters 99",
    ),
    ("wsd_is_whole", "--lr-decay-style WSD", ["--lr-wsd-decay-iters"], "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
    ("wsd_is_whole", "--lr-wsd-decay-iters 10", ["--lr-wsd-decay-iters 10 needs --lr-decay-style WSD"], ""),
    ("rates_ordered", "--min-lr 1e-2", ["--min-lr 0.01 is above --lr 0.001"], "--min-lr 1e-3"),
    (
        "decoupled_rates_ordered",
        "--decoupled-min-lr 1e-5",
        ["needs --decoupled-lr"],
        "--decoupled-min-lr 1e-5 --decoupled-lr 1e-4",
    ),
    (
        "weight_decay_ramp_is_whole",
        "--weight-decay-incr-style linear",
        ["needs --start-weight-decay"],
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
    ),
    (
        "weight_decay_ramp_is_whole",
        "--end-weight-decay 0.1",
        ["belong to a ramp"],
        "--start-weight-decay 0.01 --end-weight-decay 0.01",
    ),
    (
        "one_scheduler_wins",
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        ["opposites"],
        "--override-opt_param-scheduler",
    ),
    (
        "loss_scale_needs_fp16",
        "--fp16 --initial-loss-scale 2 --min-loss-scale 4",
        ["--min-loss-scale 4 is above"],
        "--fp16 --initial-loss-scale 4",
    ),
    (
        "post_validation_has_a_barrier_to_remove",
        "--optimizer-post-validation",
        ["--pipeline-model-parallel-size is 1; leave it out"],
        "--optimizer-post-validation --pipeline-model-parallel-size 2",
    ),
    (
        "post_validation_has_a_barrier_to_remove",
        "--optimizer-post-validation --pipeline-model-parallel-size 2 --calculate-per-token-loss",
        ["--calculate-per-token-loss divides the gradient by the number of tokens", "leave one of the two out"],
        "--enable-optimizer-post-validation --pipeline-model-parallel-size 2",
    ),
    (
        "fp64_state_is_not_narrowed",
        "--use-precision-aware-optimizer --dtype fp64",
        ["fp64 is for verification", "leave it out"],
        "--use-precision-aware-optimizer --bf16",
    ),
    (
        "libraries_update_fp32_state",
        "--use-precision-aware-optimizer --bf16 --optimizer-impl apex",
        ["--optimizer-impl apex updates fp32 state", "use --optimizer-impl torch"],
        "--use-precision-aware-optimizer --bf16 --optimizer-impl torch",
    ),
    (
        "weights_are_no_narrow_masters",
        "--use-precision-aware-optimizer --main-params-dtype fp16",
        ["the weights are their own masters", "use --bf16 or --fp16"],
        "--use-precision-aware-optimizer --main-params-dtype fp16 --bf16",
    ),
    (
        "fp16_gradients_need_a_loss_scale",
        "--use-precision-aware-optimizer --main-grads-dtype fp16 --bf16",
        ["needs a loss scale, which --dtype bf16 does not have", "use --main-grads-dtype bf16"],
        "--use-precision-aware-optimizer --main-grads-dtype fp16 --fp16",
    ),
    (
        "narrow_dtypes_are_asked_for",
        "--main-grads-dtype bf16 --exp-avg-sq-dtype fp16",
        ["need --use-precision-aware-optimizer; add it, or leave these out"],
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-sq-dtype fp16",
    ),
    (
        "profile_span_ordered",
        "--profile-step-start 12",
        ["--profile-step-end 12 must be above"],
        "--profile-step-start 11",
    ),
    (
        "stragglers_need_heartbeats",
        "--log-straggler --hang-timeout-seconds 0",
        ["needs --hang-timeout-seconds above 0"],
        "--log-straggler --hang-timeout-seconds 9",
    ),
    (
        "spikes_find_a_checkpoint",
        "--spike-rollback 2 --save a",
        ["--spike-rollback 2 needs checkpoints to go back to", "--save-interval"],
        "--spike-rollback 2 --save a --save-interval 5",
    ),
    (
        "spikes_find_a_checkpoint",
        "--spike-rollback 2 --save a --save-interval 5 --keep-last 2",
        ["give --keep-last 3 or more"],
        "--spike-rollback 2 --save a --save-interval 5 --keep-last 3",
    ),
    (
        "spikes_find_a_checkpoint",
        "--spike-rollback 2 --save a --save-interval 5 --no-save-optim",
        ["which --no-save-optim leaves out"],
        "--spike-rollback 2 --save a --save-interval 5",
    ),
    ("one_source_of_data", "--data-path a", ["--mock-data and --data-path are different"], ""),
    ("split_fits_source", "--split 0,0,0", ["--split 0,0,0", "969,30,1"], "--split 1,0,0"),
    ("split_leaves_training_data", "--split 0,1,0", ["--split 0,1,0 leaves nothing for training"], "--split 1,1,0"),
    ("blends_alternate", "--no-mock-data --data-path 0.3 a b", ["alternate"], "--no-mock-data --data-path 0.3 a 0.7 b"),
    ("blends_alternate", "--no-mock-data --data-path 0 a 1 b", ["above 0"], "--no-mock-data --data-path a b"),
    (
        "tokenizer_has_its_files",
        "--tokenizer-type SentencePieceTokenizer",
        ["needs --tokenizer-model"],
        "--tokenizer-type ByteTokenizer",
    ),
    (
        "tokenizer_has_its_files",
        "--tokenizer-model t",
        ["needs --tokenizer-type"],
        "--tokenizer-model t --tokenizer-type HuggingFaceTokenizer",
    ),
    (
        "retained_checkpoints_are_saved",
        "--save d --save-interval 50 --save-retain-interval 120",
        ["not a multiple of --save-interval 50; use 100"],
        "--save d --save-interval 50 --save-retain-interval 100",
    ),
    ("loading_needs_a_directory", "--finetune", ["--finetune needs --load DIR"], "--finetune --load d"),
    (
        "finetuning_starts_anew",
        "--load d --finetune --use-checkpoint-opt_param-scheduler",
        ["step 0"],
        "--load d --finetune",
    ),
    (
        "attention_has_a_kernel",
        "--attention-impl flash --bf16",
        ["--attention-impl flash has no kernel for --attention-dropout above 0", "or use --attention-impl sdpa"],
        "--attention-impl flash --bf16 --attention-dropout 0",
    ),
    (
        "attention_has_a_kernel_for_documents",
        "--attention-impl te --bf16 --attention-dropout 0 --reset-attention-mask",
        ["--attention-impl te has no kernel for --reset-attention-mask", "or use --attention-impl sdpa"],
        "--attention-impl flash --bf16 --attention-dropout 0 --reset-attention-mask",
    ),
    (
        "chunks_have_a_size",
        "--attention-kind chunked",
        ["--attention-kind chunked needs --window-size, the tokens of a chunk"],
        "--attention-kind chunked --window-size 16",
    ),
    (
        "optimizer_has_a_kernel",
        "--optimizer-impl te --optimizer sgd",
        ["fused Adam", "--optimizer-impl torch"],
        "--optimizer-impl te",
    ),
    (
        "chunks_have_a_size",
        "--attention-kind chunked",
        ["--attention-kind chunked needs --window-size, the tokens of a chunk"],
        "--attention-kind chunked --window-size 16",
    ),
    (
        "optimizer_has_a_kernel",
        "--optimizer-impl te --optimizer-cpu-offload",
        ["keeps the state on the host"],
        "--optimizer-impl te",
    ),
    ("optimizer_has_a_kernel", "--optimizer-impl apex --fp64", ["fp32 master weights"], "--optimizer-impl apex"),
    (
        "chunks_have_a_size",
        "--attention-kind chunked",
        ["--attention-kind chunked needs --window-size, the tokens of a chunk"],
        "--attention-kind chunked --window-size 16",
    ),
    (
        "optimizer_has_a_kernel",
        "--optimizer-impl apex --transformer-impl transformer_engine",
        ["uses apex's norms", "use --optimizer-impl te or torch"],
        "--optimizer-impl te --transformer-impl transformer_engine",
    ),
    (
        "libraries_compute_on_gpus",
        "--optimizer-impl te --device cpu",
        ["--optimizer-impl te: these libraries"],
        "--device cpu",
    ),
    (
        "fp8_settings_need_fp8",
        "--fp8-recipe tensorwise --fp8-margin 1",
        ["--fp8-recipe tensorwise and --fp8-margin 1 need --fp8-format"],
        "--fp8-recipe tensorwise --fp8-margin 1 --fp8 e4m3",
    ),
    (
        "fp8_multiplies_sizes_of_experts",
        "--fp8 hybrid --bf16 --num-experts 4 --moe-ffn-hidden-size 40 --disable-bias-linear --moe-router-topk 2",
        ["needs GEMMs whose sizes are multiples of 16, but --moe-ffn-hidden-size / etp = 40"],
        (
            "--fp8 hybrid --bf16 --num-experts 4 --ffn-hidden-size 40 --moe-ffn-hidden-size 48 --disable-bias-linear "
            "--moe-shared-expert-intermediate-size 16"
        ),
    ),
    (
        "fp8_multiplies_sizes_of_latents",
        "--fp8 hybrid --bf16 --multi-latent-attention --position-embedding-type rope --qk-pos-emb-head-dim 24",
        ["multiples of 16, but --kv-lora-rank + --qk-pos-emb-head-dim = 56"],
        "--fp8 hybrid --bf16 --multi-latent-attention --position-embedding-type rope --qk-pos-emb-head-dim 16",
    ),
    (
        "graphs_follow_steps_without_them",
        f"{GRAPHS} --cuda-graph-warmup-steps 0",
        ["give --cuda-graph-warmup-steps 1 or more"],
        "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 0",
    ),
    ("graphs_record_a_gpu", f"{GRAPHS} --device cpu", ["--device is cpu", "leave one of the two out"], GRAPHS),
    (
        "graphs_repeat_themselves",
        "--enable-cuda-graph --hidden-dropout 0.1 --attention-dropout 0.2 --fp16",
        [
            "--hidden-dropout 0.1 and --attention-dropout 0.2 would drop the same",
            "--hidden-dropout 0 --attention-dropout 0",
            "fixed --loss-scale",
        ],
        f"{GRAPHS} --fp16 --loss-scale 1024",
    ),
    (
        "graphs_repeat_themselves",
        f"{GRAPHS} --fp8 hybrid --bf16 --cuda-graph-warmup-steps 1",
        ["from the second step on", "--cuda-graph-warmup-steps 2"],
        f"{GRAPHS} --fp8 hybrid --fp8-recipe tensorwise --bf16 --cuda-graph-warmup-steps 1",
    ),
    (
        "graphs_repeat_themselves",
        f"{GRAPHS} --distributed-backend gloo --tensor-model-parallel-size 2",
        ["gloo computes tensor-parallel sums on the host", "use nccl"],
        f"{GRAPHS} --distributed-backend gloo --pipeline-model-parallel-size 2",
    ),
    (
        "fp8_has_one_set_of_weights_a_step",
        "--fp8-format e4m3 --fp64",
        ["fp64 is for verification"],
        "--fp8-format e4m3 --bf16",
    ),
    (
        "fp8_sizes_are_multiples",
        "--fp8-format e4m3 --ffn-hidden-size 72",
        ["multiples of 16", "--ffn-hidden-size / tp = 72"],
        "--fp8-format e4m3 --ffn-hidden-size 80",
    ),
    (
        "micro_blocks_of_transformer_engine_are_whole",
        "--transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe mxfp8 --ffn-hidden-size 80",
        ["multiples of 32", "--ffn-hidden-size / tp = 80"],
        "--transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe mxfp8 --ffn-hidden-size 96",
    ),
    ("checkpoints", "--save d --save-retain-interval 100", ["needs a --save-interval that divides it"], "--save d"),
    (
        "chunks",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL "
        "--num-layers-per-virtual-pipeline-stage 2",
        ["gives the layers of each chunk"],
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL",
    ),
    (
        "chunks",
        "--num-layers-per-virtual-pipeline-stage 2",
        ["--num-layers-per-virtual-pipeline-stage 2 needs --pipeline-model-parallel-size"],
        "--num-layers-per-virtual-pipeline-stage 4",
    ),
    (
        "recompute",
        "--recompute-activations --recompute-modules mlp mlp",
        ["names a module twice"],
        "--recompute-activations --recompute-modules mlp",
    ),
    (
        "sources",
        "--split 1,1,1 --train-data-path x --no-mock-data",
        ["names each part itself"],
        "--train-data-path x --no-mock-data",
    ),
    (
        "rotary_positions",
        "--position-embedding-type rope --rope-scaling-type yarn --yarn-beta-fast 1",
        ["--yarn-beta-fast 1 must be above --yarn-beta-slow 1"],
        "--position-embedding-type rope --rope-scaling-type yarn --yarn-beta-fast 2",
    ),
    (
        "padded_vocabulary",
        "--tensor-model-parallel-size 2 --padded-vocab-size 101",
        ["does not divide --padded-vocab-size 101; use 100 or 102"],
        "--tensor-model-parallel-size 2 --padded-vocab-size 102",
    ),
    (
        "layers_of_stages",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --account-for-loss-in-pipeline-split",
        ["both relieve the first and last rank"],
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    ),
    (
        "layers_of_stages",
        "--decoder-first-pipeline-num-layers 1",
        ["--decoder-first-pipeline-num-layers needs --pipeline-model-parallel-size of at least 2"],
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
    ),
    (
        "kept_attention",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-keep-attention "
        "--attention-impl te --bf16 --attention-dropout 0",
        ["torch does not see the kernels of --attention-impl te"],
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-keep-attention "
        "--attention-dropout 0",
    ),
    ("rates", "--lr-warmup-init 0.1", ["--lr-warmup-init 0.1 is above --lr 0.001"], "--lr-warmup-init 1e-4"),
    (
        "rates",
        "--decoupled-lr 1e-3 --decoupled-min-lr 1e-2",
        ["--decoupled-min-lr 0.01 is above --decoupled-lr 0.001"],
        "--decoupled-lr 1e-2 --decoupled-min-lr 1e-3",
    ),
    (
        "weight_decay",
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        ["the ramp must rise"],
        "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2",
    ),
]
RAMPS = [
    ("--rampup-batch-size 2 2 100", "needs --global-batch-size"),
    ("--global-batch-size 8 --rampup-batch-size 16 2 100", "starts above --global-batch-size 8"),
    ("--global-batch-size 8 --rampup-batch-size 2 4 100", "an INCREMENT that divides 6"),
    ("--global-batch-size 8 --rampup-batch-size 4 1 100", "multiples of --micro-batch-size 2"),
    ("--global-batch-size 8 --rampup-batch-size 0 2 100", "at least 1"),
    ("--step-batch-size-schedule 0:2 1K", "1K is not TOKENS:SIZE"),
    ("--step-batch-size-schedule 5K:2 10K:4", "the first TOKENS must be 0"),
    ("--global-batch-size 8 --step-batch-size-schedule 0:2 1M:4", "give 4"),
    ("--step-batch-size-schedule 0:3 1M:4", "3 is not a multiple of --micro-batch-size 2"),
    ("--global-batch-size 8 --rampup-batch-size 2 2 9 --step-batch-size-schedule 0:8", "one of the two"),
]
EXTENSION = "--extension tests/fixtures/extension.py"
CASES += [
    (
        "attention_of_an_extension_is_not_softmax",
        f"{EXTENSION} --attention-kind plain-attention --attention-dropout 0 --attn-logit-softcapping 30",
        ["--attn-logit-softcapping belongs to softmax attention, not to --attention-kind plain-attention"],
        f"{EXTENSION} --attention-kind plain-attention --attention-dropout 0",
    ),
    (
        "libraries_lack_norms_of_extensions",
        f"{EXTENSION} --normalization plain-norm --optimizer-impl apex",
        ["--optimizer-impl apex has norms of its own, not --normalization plain-norm; use --optimizer-impl torch"],
        f"{EXTENSION} --normalization plain-norm",
    ),
    (
        "options_belong_to_a_data_set",
        "--dataset-options digits=2",
        ["--dataset-options digits=2 needs --dataset NAME; add it, or leave this out"],
        "",
    ),
    (
        "options_belong_to_an_update_rule",
        f"{EXTENSION} --optimizer plain-rule --optimizer-options gamma=1",
        ["--optimizer-options gamma=1: no option of --optimizer plain-rule; its options are beta"],
        f"{EXTENSION} --optimizer plain-rule --optimizer-options beta=0.25",
    ),
]
# like CASES, but only configurations built in code can break these rules
IN_CODE = [
    ({"data": {"mock_data": False, "data_path": ()}}, "--data-path is empty"),
    (
        {"recompute": {"recompute_granularity": "selective", "recompute_modules": ()}},
        "needs at least one of --recompute-modules",
    ),
    (
        {"training": {"train_iters": None, "train_samples": 1000}, "optimizer": {"lr_decay_iters": 10}},
        "--lr-decay-iters count in steps",
    ),
]
JOBS = [
    ("job_has_a_length", {"training": {"train_iters": None}}, "--train-iters or --train-samples"),
    ("job_has_a_rate", {"optimizer": {"lr": None}}, "--lr, the highest learning rate, is missing"),
    ("job_has_data", {"data": {"mock_data": False}}, "--data-path"),
    ("job_has_data", {"data": {"mock_data": False, "valid_data_path": ("v",)}}, "add --train-data-path"),
    ("job_has_a_vocabulary", {"model": {"vocab_size": None}}, "--tokenizer-type"),
]


@pytest.mark.parametrize(("rule", "flags", "words", "fine"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_a_broken_rule_has_a_remedy_and_similar_valid_flags_pass(
    rule: str, flags: str, words: list[str], fine: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job(flags))
    for word in words:
        assert word in str(error.value)
    load_config(job(fine))


@pytest.mark.parametrize(("flags", "words"), RAMPS, ids=[case[1] for case in RAMPS])
def test_a_batch_ramp_must_reach_the_global_batch_size(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config([*SAMPLES.split(), *flags.split()])
    ramp = "--global-batch-size 8 --rampup-batch-size 2 2 100"
    load_config([*SAMPLES.split(), *ramp.split()])


def changed(config: Config, changes: dict[str, dict[str, object]]) -> Config:
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in changes.items()}
    )


@pytest.mark.parametrize(("rule", "changes", "words"), JOBS, ids=[f"{case[0]}: {case[1]}" for case in JOBS])
def test_an_incomplete_job_is_refused(rule: str, changes: dict[str, dict[str, object]], words: str) -> None:
    config = load_config(job()).config
    check(config, [job_rule])
    broken = changed(config, changes)
    check(broken)
    with pytest.raises(ConfigError, match=words):
        check(broken, [job_rule])


@pytest.mark.parametrize(("changes", "words"), IN_CODE, ids=[words for _, words in IN_CODE])
def test_a_configuration_made_in_code_obeys_the_rules(changes: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(changed(load_config(job()).config, changes))


def test_every_rule_is_broken_by_a_case() -> None:
    """Every `yield` of a rule runs in some case, and every required option is left out once."""
    modules = [getattr(rules, name) for name in ("context", "model", "gpu", "optimizer", "training")]
    expected = {
        (str(module.__file__), node.lineno)
        for module in modules
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(node, ast.Yield)
    }
    reached: set[tuple[str, int]] = set()

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    messages = []
    sys.settrace(trace)
    try:
        for flags in [*(job(case[1]) for case in CASES), *([*SAMPLES.split(), *ramp.split()] for ramp, _ in RAMPS)]:
            with pytest.raises(ConfigError) as error:
                load_config(flags)
            messages.append(str(error.value))
        for changes in [*(changes for _, changes, _ in JOBS), *(changes for changes, _ in IN_CODE)]:
            with pytest.raises(ConfigError):
                check(changed(load_config(job()).config, changes), [job_rule])
    finally:
        sys.settrace(None)
    assert expected <= reached
    needed = {field.option.needs for field in all_fields()}
    assert not [
        need
        for need in needed
        if need is not None
        and not need.without
        and not any(f"needs {need.flag}" in m or f"need {need.flag}" in m for m in messages)
    ]


@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        (
            "--save-interval 5 --async-save",
            "--save-interval 5 and --async-save without --save DIR: nothing will be saved",
        ),
        (
            "--bf16 --initial-loss-scale 65536 --hysteresis 3",
            "--initial-loss-scale 65536.0 and --hysteresis 3 without --fp16: the loss is not scaled",
        ),
        (
            "--optimizer sgd --adam-beta1 0.8 --adam-eps 1e-6",
            "--adam-beta1 0.8 and --adam-eps 1.0e-06 without --optimizer adam or muon: only AdamW reads it",
        ),
        (
            "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-amax-history-len 16",
            "--fp8-amax-history-len without --fp8-recipe delayed: scales come from the tensors of the same step",
        ),
        ("--sample-tokens 5", "--sample-tokens 5 without --sample-prompts: no text is written"),
        ("--sgd-momentum 0.5", "--sgd-momentum 0.5 without --optimizer sgd: only SGD reads it"),
        ("--split 90,5,5", '--split "90,5,5" without --data-path: nothing else is divided'),
        ("--no-manual-gc-eval", "--no-manual-gc-eval without --manual-gc: Python decides when garbage is collected"),
        (
            "--recompute-method uniform --recompute-num-layers 1",
            "--recompute-method uniform and --recompute-num-layers 1 without --recompute-granularity full: only full "
            "recompute reads it",
        ),
        (
            "--multi-latent-attention --position-embedding-type rope --kv-channels 100",
            "--kv-channels 100 has no effect with --multi-latent-attention: heads have 192 channels, --qk-head-dim and "
            "--qk-pos-emb-head-dim together",
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff 0.1 has no effect with --moe-router-load-balancing-type none",
        ),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid: scores of experts do not "
            "depend on each other",
        ),
        (
            "--num-experts 4 --moe-shared-expert-intermediate-size 64 --recompute-granularity selective "
            "--recompute-modules layernorm shared_experts",
            "--recompute-modules layernorm shared_experts: shared experts that run again keep the output of the norm "
            "before them, so only attention's norms are recomputed",
        ),
        (
            "--num-experts 4 --recompute-granularity selective --recompute-modules mlp core_attn",
            "--recompute-modules mlp has no effect: every layer has experts, for which there are moe and moe_act",
        ),
        (
            "--num-experts 4 --moe-token-dispatcher-type allgather --moe-expert-capacity-factor 1",
            "--moe-token-dispatcher-type allgather runs as alltoall: the same results up to rounding",
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
            "--moe-router-load-balancing-type sinkhorn balances each rank's tokens: results depend on "
            "--tensor-model-parallel-size, --context-parallel-size and --micro-batch-size",
        ),
        (
            "--cuda-graph-warmup-steps 5",
            "--cuda-graph-warmup-steps 5 without --cuda-graph-impl local: no graphs are recorded",
        ),
        (
            "--cuda-graph-impl transformer_engine",
            "--cuda-graph-impl transformer_engine: kernels are launched one by one; --cuda-graph-impl local records "
            "whole stages",
        ),
        ("--cp-comm-type a2a", "--cp-comm-type a2a without --context-parallel-size N: every rank has whole sequences"),
        ("--wandb-exp-name run", "--wandb-exp-name run without --wandb-project: nothing is sent to Weights & Biases"),
        (
            "--manual-gc-interval 5",
            "--manual-gc-interval 5 without --manual-gc: Python decides when garbage is collected",
        ),
    ],
    ids=lambda value: value.split()[0],
)
def test_what_megatron_accepts_without_effect_is_accepted_with_one_remark(flags: str, remark: str) -> None:
    assert load_config(job(flags)).remarks == (remark,)


def test_defaults_break_no_rule() -> None:
    check(Config())


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job("--cp-comm-type a2a p2p a2a --global-batch-size 9 --finetune"))
    assert len(str(error.value).splitlines()) == 3


def test_a_configuration_made_in_code_is_held_to_choices_and_ranges() -> None:
    config = Config()
    broken = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=0, normalization="Norm"))
    with pytest.raises(ConfigError) as error:
        check(broken)
    assert str(error.value).splitlines()[0] == "model.num_layers 0: expected a value at least 1 and at most 100000"
    assert "model.normalization Norm: choose LayerNorm" in str(error.value)


def test_sequence_parallelism_without_tensor_parallelism_is_accepted() -> None:
    assert load_config(job("--sequence-parallel --seq-length 31")).config.parallel.sequence_parallel


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=50)
def test_proposed_values_work(first: int, second: int, wanted: int) -> None:
    proposed = nearest_values(divisors(first, second), wanted)
    assert proposed
    assert all(first % value == 0 and second % value == 0 for value in proposed)
    assert str(proposed[0]) in use_divisors(first, second, wanted=wanted)
    assert all(int(word) % first == 0 for word in use_multiples(first, wanted).removeprefix("use ").split(" or "))


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("99, 1, 0", (0.99, 0.01, 0.0)),
        ("8/1/1", (0.8, 0.1, 0.1)),
        ("1", (1.0, 0.0, 0.0)),
        ("3,1", (0.75, 0.25, 0.0)),
    ],
    ids=lambda value: str(value),
)
def test_a_split_is_shares_that_sum_to_one(text: str, shares: tuple[float, float, float]) -> None:
    assert split_shares(text) == pytest.approx(shares)


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,1,1", "0,0", "nan,1", "inf,1"])
def test_a_bad_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        split_shares(text)


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        ("a", ["a"], None),
        ("a b", ["a", "b"], None),
        ("a b c", ["a", "b", "c"], None),
        ("1 a", ["a"], [1.0]),
        ("0.3 a 0.7 b", ["a", "b"], [0.3, 0.7]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_blend_is_prefixes_with_or_without_weights(words: str, prefixes: list[str], weights: list[float]) -> None:
    assert parse_blend(words.split(), "--data-path") == (prefixes, weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data-path is empty"),
        (["a", " "], "--data-path is empty"),
        (["0.3", "a", "b", "c"], "must alternate"),
        (["0.3", "a", "0.7"], "must alternate"),
        (["a", "3"], "must alternate"),
        (["0", "a", "1", "b"], "must be above 0"),
        (["-1", "a", "2", "b"], "must be above 0"),
        (["nan", "a"], "must be above 0"),
        (["inf", "a"], "must be above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_blend_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_blend(words, "--data-path")


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("", 256),
        ("--swiglu", 128),
        ("--swiglu --ffn-hidden-size 40", 40),
        ("--activation geglu_tanh --hidden-size 4096", 10880),
    ],
)
def test_the_width_of_the_mlp_is_megatrons(flags: str, width: int) -> None:
    assert load_config(job(flags)).config.model.feed_forward_size() == width

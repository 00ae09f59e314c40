"""Rows of tests/test_flag_effects.py: for each configuration field, the flags that change it and the expected effect.

Format: FIELD | FLAGS THAT CHANGE IT | EXPECTED EFFECT | FLAGS GIVEN TO BOTH RUNS | RANKS. `!--flag` removes a flag of
the base. In paths {tmp} is the run's own folder, {saved} holds checkpoints of steps 1 and 2 of the base, {A} and {B}
are token files, and {chats} holds a tokenizer with a chat template and chat.jsonl.

records      the run succeeds with different records of steps and evaluations
outcome      exit code or messages differ
said X       the run prints X, and did not without the flags
file X       the run writes a file X, and did not without the flags
plan X       part X of the plan differs (nothing is run)
saved_bytes  the size of the activations kept for the backward differs
ranks X      in a step on two ranks X differs: losses, or the order of events, or of collectives over tp
NAME         a function of the test file
"""

from __future__ import annotations

from pathlib import Path

EXTEND = f"--extension {Path(__file__).resolve().parent.parent / 'examples' / 'extend_'}"
SUMS = f"{EXTEND}dataset.py --vocab-size 257 !--mock-data --dataset sums"
PP = "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 16"
PP5 = f"{PP} --num-layers 5 --vocab-size 4096"
SP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
CP2 = "--context-parallel-size 2"
DRY = "--hidden-dropout 0 --attention-dropout 0"
ROPE = "--position-embedding-type rope"
LLAMA3 = f"{ROPE} --rope-scaling-type llama3 --rope-original-max-position-embeddings 16"
MOE = "--num-experts 4 --disable-bias-linear"
LATENT = f"{ROPE} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4"
SIGMOID = f"{MOE} --moe-router-score-function sigmoid"
CAPACITY = "--moe-expert-capacity-factor 0.5"
ROOM = "--moe-expert-capacity-factor 2"
BIAS = "--moe-router-enable-expert-bias"
YARN = (
    f"{ROPE} --rope-scaling-type yarn --kv-channels 16 --rotary-base 100 --rope-original-max-position-embeddings 4096"
)
DOCUMENTS = "--tokenizer-type NullTokenizer --vocab-size 7"
SAMPLES = "!--train-iters --train-samples 12"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 3"
RAMP = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5"
ZERO3 = "--global-batch-size 8 --data-parallel-sharding-strategy optim_grads_params"
UNITS = f"{ZERO3} --data-parallel-sharding-units 2"
FP16 = "--fp16 --initial-loss-scale 256"
NARROW = "--bf16 --use-precision-aware-optimizer"
FULL = "--num-layers 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FP8 = "--hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 1"
FILES = "!--mock-data --train-data-path {A} --valid-data-path {A} --test-data-path {A}"
LOAD = "--load {saved} --lr-decay-style constant"
SAVE = "--save {tmp}/ckpt"
SPIKES = f"{SAVE} --save-interval 1 --spike-rollback 1 --train-iters 12"
PROFILE = f"{SAVE} --profile --profile-step-start 0"
SENTENCES = "--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp}/a.model"
GPT2 = "!--vocab-size --tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {tmp}/a.txt"

CHAT_FILES = (
    "!--mock-data !--vocab-size --train-data-path {chats}/chat.jsonl --valid-data-path {chats}/chat.jsonl "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {chats} --seq-length 64"
)
CHATS = f"{CHAT_FILES} --sft --sft-overlong truncate"

TABLE = f"""
model.num_layers | --num-layers 3 | plan specs
model.hidden_size | --hidden-size 32 | plan specs
model.ffn_hidden_size | --ffn-hidden-size 32 | plan specs
model.num_attention_heads | --num-attention-heads 2 | records
model.num_query_groups | --group-query-attention --num-query-groups 2 | plan specs
model.kv_channels | --kv-channels 8 | plan specs
model.seq_length | --seq-length 12 | records
model.max_position_embeddings | --max-position-embeddings 16 | plan specs
model.vocab_size | --vocab-size 24 | records
model.padded_vocab_size | --padded-vocab-size 40 | plan specs
model.make_vocab_size_divisible_by | --make-vocab-size-divisible-by 64 | plan specs
model.position_embedding_type | --position-embedding-type rope | records
model.rotary_base | --rotary-base 100 | records | {ROPE}
model.rotary_percent | --rotary-percent 0.5 | records | {ROPE}
model.rope_scaling_type | --rope-scaling-type linear | records | {ROPE}
model.rope_scaling_factor | --rope-scaling-factor 2 | records | {ROPE} --rope-scaling-type linear
model.rope_low_freq_factor | --rope-low-freq-factor 2 | records | {LLAMA3}
model.rope_high_freq_factor | --rope-high-freq-factor 8 | records | {LLAMA3}
model.rope_original_max_position_embeddings | --rope-original-max-position-embeddings 32 | records | {LLAMA3}
model.yarn_beta_fast | --yarn-beta-fast 64 | records | {YARN}
model.yarn_beta_slow | --yarn-beta-slow 4 | records | {YARN}
model.yarn_mscale | --yarn-mscale 0.5 | records | {YARN} --yarn-mscale-all-dim 0.8
model.yarn_mscale_all_dim | --yarn-mscale-all-dim 0.5 | records | {YARN}
model.yarn_correction_range_round_to_int | --no-yarn-correction-range-round-to-int | records | {YARN}
model.yarn_query_scale | --yarn-query-scale 2 | records | {LATENT} --rope-scaling-type yarn --rotary-base 100 \
    --rope-original-max-position-embeddings 2
model.no_rope_freq | --no-rope-freq 2 | records | {ROPE}
model.nope_query_scale | --nope-query-scale 2 --nope-query-scale-length 2 | records | {ROPE} --no-rope-freq 2
model.nope_query_scale_length | --nope-query-scale-length 2 | records | {ROPE} --no-rope-freq 2 --nope-query-scale 2
model.multi_latent_attention | --multi-latent-attention | plan specs | {ROPE}
model.q_lora_rank | --q-lora-rank 8 | plan specs | {LATENT}
model.kv_lora_rank | --kv-lora-rank 4 | plan specs | {LATENT}
model.qk_head_dim | --qk-head-dim 8 | plan specs | {LATENT}
model.qk_pos_emb_head_dim | --qk-pos-emb-head-dim 2 | plan specs | {LATENT}
model.v_head_dim | --v-head-dim 2 | plan specs | {LATENT}
model.latent_norm_epsilon | --latent-norm-epsilon 0.1 | records | {LATENT} --qk-layernorm
model.num_experts | --num-experts 4 | plan specs | --disable-bias-linear
model.moe_layer_freq | --moe-layer-freq 2 | plan specs | {MOE}
model.moe_ffn_hidden_size | --moe-ffn-hidden-size 8 | plan specs | {MOE}
model.moe_shared_expert_intermediate_size | --moe-shared-expert-intermediate-size 8 | plan specs | {MOE}
model.moe_shared_expert_gate | --moe-shared-expert-gate | plan specs | {MOE} --moe-shared-expert-intermediate-size 8
model.moe_router_topk | --moe-router-topk 3 | records | {MOE}
model.moe_router_score_function | --moe-router-score-function sigmoid | records | {MOE}
model.moe_router_pre_softmax | --moe-router-pre-softmax | records | {MOE}
model.moe_router_topk_scaling_factor | --moe-router-topk-scaling-factor 2 | records | {MOE}
model.moe_router_num_groups | --moe-router-num-groups 2 --moe-router-group-topk 1 | records | {MOE}
model.moe_router_group_topk | --moe-router-group-topk 1 | outcome | {MOE} --moe-router-num-groups 2
model.moe_router_group_score_topk | --moe-router-group-score-topk 2 | records | \
    {MOE} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk 1 --moe-router-pre-softmax
model.moe_router_norm_topk_prob | --no-moe-router-norm-topk-prob | records | {SIGMOID}
model.moe_apply_probs_on_input | --moe-apply-probs-on-input | records | {MOE}
model.moe_router_enable_expert_bias | {BIAS} --moe-router-bias-update-rate 0.5 | records | {SIGMOID}
model.moe_router_bias_update_rate | --moe-router-bias-update-rate 0.5 | records | {SIGMOID} {BIAS}
model.moe_expert_capacity_factor | {CAPACITY} | records | {MOE}
model.moe_token_drop_policy | --moe-token-drop-policy position | records | {MOE} {CAPACITY}
model.moe_token_dispatcher_type | --moe-token-dispatcher-type flex | plan memory | \
    {MOE} --micro-batch-size 1 --expert-model-parallel-size 4 | 4
model.moe_combine_in_node | --moe-combine-in-node | plan memory | \
    {MOE} --micro-batch-size 1 --expert-model-parallel-size 4 --moe-token-dispatcher-type flex | 4
model.moe_flex_dispatcher_backend | --moe-flex-dispatcher-backend deepep | said dispatcher-backend deepep: | \
    {MOE} --moe-token-dispatcher-type flex
model.moe_pad_expert_input_to_capacity | --moe-pad-expert-input-to-capacity | saved_bytes | {MOE} {ROOM}
model.moe_router_dtype | --moe-router-dtype fp32 | records | {MOE} --bf16
model.moe_router_force_load_balancing | --moe-router-force-load-balancing | records | {MOE}
model.moe_router_load_balancing_type | --moe-router-load-balancing-type seq_aux_loss | records | \
    {MOE} --moe-aux-loss-coeff 9
model.moe_aux_loss_coeff | --moe-aux-loss-coeff 9 | records | {MOE}
model.moe_z_loss_coeff | --moe-z-loss-coeff 9 | records | {MOE}
model.normalization | --normalization RMSNorm | records
model.norm_position | --norm-position around | plan specs
model.norm_epsilon | --norm-epsilon 0.1 | records
model.layernorm_zero_centered_gamma | --apply-layernorm-1p | plan specs
model.activation | --activation relu | records
model.glu_linear_offset | --glu-linear-offset 1 | records | --swiglu
model.activation_func_clamp_value | --activation-func-clamp-value 0.001 | records | --swiglu
model.add_bias_linear | --disable-bias-linear | plan specs
model.add_qkv_bias | --add-qkv-bias | plan specs | --disable-bias-linear
model.untie_embeddings_and_output_weights | --untie-embeddings-and-output-weights | plan specs
model.embedding_scale | --embedding-scale 3 | records
model.residual_scale | --residual-scale 3 | records
model.logits_scaling | --logits-scaling 3 | records
model.qk_layernorm_after_rope | --qk-layernorm-after-rope | records | --qk-layernorm {ROPE}
model.attention_output_gate | --attention-output-gate | plan specs
model.qk_l2_norm | --qk-l2-norm | records
model.qk_layernorm | --qk-layernorm | records
model.qk_layernorm_scope | --qk-layernorm-scope projection | records | --qk-layernorm --normalization RMSNorm
model.window_size | --window-size 3 | records
model.window_attn_skip_freq | --window-attn-skip-freq 2 | records | --window-size 3
model.layer_pattern | --layer-pattern '1 window_size=3' ... | records
model.mtp_num_layers | --mtp-num-layers 1 | plan specs | {ROPE}
model.mtp_loss_scaling_factor | --mtp-loss-scaling-factor 2 | records | {ROPE} --mtp-num-layers 1
model.softmax_type | --softmax-type learnable | plan specs
model.attn_logit_softcapping | --attn-logit-softcapping 0.1 | records
model.final_logit_softcapping | --final-logit-softcapping 0.1 | records
model.softmax_scale | --softmax-scale 2 | records
model.attention_kind | --attention-kind sigmoid | records | {EXTEND}layer.py
model.attention_options | --attention-options expand=2 | records | {EXTEND}mixer.py --attention-kind decay
model.attention_softmax_in_fp32 | --attention-softmax-in-fp32 | saved_bytes | --bf16
model.hidden_dropout | --hidden-dropout 0.5 | records
model.attention_dropout | --attention-dropout 0.5 | records
model.init_method_std | --init-method-std 0.1 | records

parallel.tensor_model_parallel_size | --tensor-model-parallel-size 2 | plan topology | | 2
parallel.pipeline_model_parallel_size | --pipeline-model-parallel-size 2 | plan topology | | 2
parallel.context_parallel_size | --context-parallel-size 2 | plan topology | | 2
parallel.cp_comm_type | --cp-comm-type a2a | plan memory | {CP2} | 2
parallel.hierarchical_context_parallel_sizes | --hierarchical-context-parallel-sizes 1 2 | plan topology | {CP2} \
--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1 | 2
parallel.pipe_sp_splits | --pipe-sp-splits 2 | plan rows | {PP} {DRY} | 2
parallel.pipe_sp_strategy | --pipe-sp-strategy average | plan memory | {PP} {DRY} --pipe-sp-splits 2 --seq-length 64 | 2
parallel.num_virtual_stages_per_pipeline_rank | --num-virtual-stages-per-pipeline-rank 2 | plan placement | {PP} | 2
parallel.num_layers_per_virtual_pipeline_stage | --num-layers-per-virtual-pipeline-stage 1 | plan placement | {PP} | 2
parallel.pipeline_model_parallel_layout | --pipeline-model-parallel-layout Et|tttL | plan partition | {PP} | 2
parallel.decoder_first_pipeline_num_layers | --decoder-first-pipeline-num-layers 1 | plan partition | \
{PP} --pipeline-balance even | 2
parallel.decoder_last_pipeline_num_layers | --decoder-last-pipeline-num-layers 1 | plan partition | \
{PP} --pipeline-balance even | 2
parallel.account_for_embedding_in_pipeline_split | --account-for-embedding-in-pipeline-split | plan partition | \
{PP} --num-layers 3 | 2
parallel.account_for_loss_in_pipeline_split | --account-for-loss-in-pipeline-split | plan partition | {PP5} | 2
parallel.pipeline_balance | --pipeline-balance even | plan partition | {PP} --vocab-size 4096 | 2
parallel.pipeline_layer_times | --pipeline-layer-times {{tmp}}/times.json | layer_times | {PP} | 2
parallel.pipeline_rank_speeds | --pipeline-rank-speeds 1 0.3 | plan partition | {PP} | 2
parallel.pipeline_rank_memory | --pipeline-rank-memory 1.1e-4 1 | plan partition | {PP} | 2
parallel.microbatch_group_size_per_virtual_pipeline_stage | --microbatch-group-size-per-virtual-pipeline-stage 3 | \
plan rows | {VPP} | 2
parallel.pipeline_schedule | --pipeline-schedule gpipe | plan rows | {PP} | 2
parallel.pipeline_memory_limit | --pipeline-memory-limit 1 | plan rows | {PP} --pipeline-schedule zb-auto | 2
parallel.pipeline_receive_depth | --pipeline-receive-depth 3 | plan rows | {PP} | 2
parallel.sequence_parallel | --sequence-parallel | plan specs | --tensor-model-parallel-size 2 | 2
parallel.expert_model_parallel_size | --expert-model-parallel-size 2 | ranks events | {MOE}
parallel.expert_tensor_parallel_size | --expert-tensor-parallel-size 2 | ranks events | {MOE}
parallel.tp_comm_overlap | --tp-comm-overlap | ranks collectives | {SP2}
parallel.tp_comm_overlap_ag | --disable-tp-comm-overlap-ag | ranks collectives | {SP2} --tp-comm-overlap
parallel.tp_comm_overlap_rs | --disable-tp-comm-overlap-rs | ranks collectives | {SP2} --tp-comm-overlap
parallel.tp_comm_overlap_chunks | --tp-comm-overlap-chunks 3 | ranks collectives | {SP2} --tp-comm-overlap
parallel.data_parallel_sharding_strategy | --data-parallel-sharding-strategy optim_grads_params | plan rows | | 2
parallel.num_distributed_optimizer_instances | --num-distributed-optimizer-instances 2 | plan buffers | \
    --use-distributed-optimizer --global-batch-size 8 | 4
parallel.data_parallel_sharding_granularity | --data-parallel-sharding-granularity step | plan rows | {UNITS} | 2
parallel.data_parallel_sharding_prefetch | --data-parallel-sharding-prefetch 3 | plan rows | {UNITS} | 2
parallel.data_parallel_sharding_units | --data-parallel-sharding-units 2 | plan rows | {ZERO3} | 2
parallel.use_distributed_optimizer | --use-distributed-optimizer | plan buffers | | 2
parallel.overlap_grad_reduce | --overlap-grad-reduce | ranks events | --ddp-bucket-size 500
parallel.overlap_param_gather | --overlap-param-gather | ranks events | --use-distributed-optimizer
parallel.overlap_moe_expert_parallel_comm | --overlap-moe-expert-parallel-comm | plan rows | \
    {MOE} --expert-model-parallel-size 2 | 2
parallel.delay_wgrad_compute | --delay-wgrad-compute | plan rows | \
    {MOE} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm | 2
parallel.overlap_p2p_comm | --no-overlap-p2p-communication | plan rows | {PP} --pipeline-receive-depth 3 | 2
parallel.grad_reduce_in_bf16 | --grad-reduce-in-bf16 | ranks losses
parallel.ddp_bucket_size | --ddp-bucket-size 500 | plan buffers
parallel.rank_order | --rank-order tp-cp-pp-dp | plan topology | {PP} --tensor-model-parallel-size 2 | 8
parallel.allow_tp_across_nodes | --allow-tp-across-nodes | plan topology | --tensor-model-parallel-size 4 | 4
parallel.allow_mixed_hosts | --allow-mixed-hosts | mixed_hosts
parallel.distributed_backend | --distributed-backend nccl | said nccl connects GPUs
parallel.hang_timeout_seconds | --hang-timeout-seconds 60 | file heartbeats/roster.json | --hang-timeout-seconds 0
parallel.distributed_timeout_minutes | --distributed-timeout-minutes 2 | time_out

recompute.recompute_granularity | --recompute-granularity selective --recompute-modules mlp | saved_bytes
recompute.recompute_method | --recompute-method block | saved_bytes | {FULL}
recompute.recompute_num_layers | --recompute-num-layers 2 | saved_bytes | {FULL}
recompute.recompute_keep_attention | --recompute-keep-attention | saved_bytes | {FULL} --attention-dropout 0
recompute.recompute_memory_budget | --recompute-memory-budget 0.5 | saved_bytes
recompute.recompute_modules | --recompute-modules mlp | saved_bytes | --recompute-granularity selective

offload.cpu_offloading_num_layers | --cpu-offloading-num-layers 3 --min-offloaded-tensor-size 1 | plan memory | \
--num-layers 4
offload.min_offloaded_tensor_size | --min-offloaded-tensor-size 1 | plan memory | \
--num-layers 4 --cpu-offloading-num-layers 3

training.micro_batch_size | --micro-batch-size 1 | plan batch
training.global_batch_size | --global-batch-size 8 | records
training.rampup_batch_size | --rampup-batch-size 2 2 6 | records | {SAMPLES}
training.step_batch_size_schedule | --step-batch-size-schedule 0:2 16:4 | records
training.train_iters | --train-iters 2 | records
training.train_samples | --train-samples 8 | records | {SAMPLES}
training.exit_interval | --exit-interval 2 | records
training.exit_duration_in_mins | --exit-duration-in-mins 1e-9 | records
training.exit_signal_handler | --no-exit-signal-handler | handlers
training.skip_train | --skip-train | records
training.eval_interval | --eval-interval 1 | records
training.eval_iters | --eval-iters 2 | records
training.seed | --seed 7 | records
training.manual_gc | --manual-gc | collections 5
training.manual_gc_interval | --manual-gc-interval 1 | collections 8 | --manual-gc
training.manual_gc_eval | --no-manual-gc-eval | collections 1 | --manual-gc
training.deterministic_mode | --deterministic-mode | determinism
training.label_smoothing | --label-smoothing 0.1 | records
training.z_loss | --z-loss 0.1 | records
training.cross_entropy_chunk_size | --cross-entropy-chunk-size 3 | saved_bytes
training.calculate_per_token_loss | --calculate-per-token-loss | records | {DOCUMENTS} --eod-mask-loss
training.check_weight_hash_across_dp_replicas_interval | --check-weight-hash-across-dp-replicas-interval 1 | comparisons
training.check_for_nan_in_loss_and_grad | --no-check-for-nan-in-loss-and-grad | outcome | --lr 1e30
training.spike_rollback | --spike-rollback 1 | said (rollback 1) | {SAVE} --save-interval 1 --lr 1e30
training.spike_limit | --spike-limit 1 | said --spike-limit 1 | {SAVE} --save-interval 1 --lr 1e30 --spike-rollback 1
training.spike_threshold | --spike-threshold 1e-9 | said (rollback 1) | {SPIKES} --spike-window 8 --spike-steps 1
training.spike_window | --spike-window 8 | said (rollback 1) | {SPIKES} --spike-steps 1 --spike-threshold 1e-9
training.spike_steps | --spike-steps 1 | said (rollback 1) | \
{SPIKES} --spike-window 8 --spike-steps 50 --spike-threshold 1e-9
training.extension | {EXTEND}schedule.py | said schedule eager-1f1b
training.device | --device cuda | device

optimizer.optimizer | --optimizer sgd | records
optimizer.lr | --lr 2e-2 | records
optimizer.min_lr | --min-lr 5e-3 | records
optimizer.lr_decay_style | --lr-decay-style cosine | records
optimizer.lr_decay_iters | --lr-decay-iters 6 | records
optimizer.lr_decay_samples | --lr-decay-samples 24 | records | {SAMPLES}
optimizer.lr_warmup_fraction | --lr-warmup-fraction 0.5 | records
optimizer.lr_warmup_iters | --lr-warmup-iters 2 | records
optimizer.lr_warmup_samples | --lr-warmup-samples 8 | records | {SAMPLES}
optimizer.lr_warmup_init | --lr-warmup-init 1e-3 | records | --lr-warmup-iters 2
optimizer.lr_wsd_decay_style | --lr-wsd-decay-style linear | records | {WSD}
optimizer.lr_wsd_decay_iters | --lr-wsd-decay-iters 2 | records | {WSD}
optimizer.lr_wsd_decay_samples | --lr-wsd-decay-samples 8 | records | \
{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 12
optimizer.weight_decay | --weight-decay 0.5 | records
optimizer.start_weight_decay | --start-weight-decay 0.2 | records | {RAMP}
optimizer.end_weight_decay | --end-weight-decay 0.9 | records | {RAMP}
optimizer.weight_decay_incr_style | --weight-decay-incr-style cosine | records | {RAMP}
optimizer.clip_grad | --clip-grad 0.01 | records | --optimizer sgd
optimizer.adam_beta1 | --adam-beta1 0.5 | records
optimizer.adam_beta2 | --adam-beta2 0.5 | records
optimizer.adam_eps | --adam-eps 0.01 | records
optimizer.sgd_momentum | --sgd-momentum 0.5 | records | --optimizer sgd
optimizer.muon_momentum | --muon-momentum 0.5 | records | --optimizer muon
optimizer.muon_nesterov | --muon-nesterov | records | --optimizer muon
optimizer.muon_coefficient_type | --muon-coefficient-type simple | records | --optimizer muon
optimizer.muon_num_ns_steps | --muon-num-ns-steps 10 | records | --optimizer muon
optimizer.muon_scale_mode | --muon-scale-mode shape_scaling | records | --optimizer muon
optimizer.muon_extra_scale_factor | --muon-extra-scale-factor 0.2 | records | --optimizer muon
optimizer.muon_no_split_qkv | --muon-no-split-qkv | records | --optimizer muon
optimizer.muon_tp_mode | --muon-tp-mode blockwise | outcome | --optimizer muon
optimizer.muon_fp32_matmul_prec | --muon-fp32-matmul-prec highest | said fp32 on GPUs: highest | --optimizer muon
optimizer.freeze | --freeze embedding.* | records plan
optimizer.optimizer_options | --optimizer-options beta2=0.5 | records | {EXTEND}update_rule.py --optimizer lion
optimizer.optimizer_cpu_offload | --optimizer-cpu-offload | plan memory
optimizer.use_precision_aware_optimizer | --use-precision-aware-optimizer | outcome | --bf16 --exp-avg-dtype bf16
optimizer.main_grads_dtype | --main-grads-dtype bf16 | plan memory | {NARROW}
optimizer.exp_avg_dtype | --exp-avg-dtype bf16 | records | {NARROW}
optimizer.exp_avg_sq_dtype | --exp-avg-sq-dtype bf16 | records | {NARROW}
optimizer.decoupled_lr | --decoupled-lr 0.1 | records
optimizer.decoupled_min_lr | --decoupled-min-lr 0.05 | records | --decoupled-lr 0.1
optimizer.override_opt_param_scheduler | --override-opt-param-scheduler | outcome | {LOAD} --lr 2e-2
optimizer.use_checkpoint_opt_param_scheduler | --use-checkpoint-opt-param-scheduler | outcome | {LOAD} --lr 2e-2

precision.dtype | --dtype bf16 | records
precision.loss_scale | --loss-scale 8 | records | {FP16}
precision.initial_loss_scale | --initial-loss-scale 512 | records | {FP16}
precision.min_loss_scale | --min-loss-scale 5e11 | outcome | --fp16 --hysteresis 1 --initial-loss-scale 1e12
precision.loss_scale_window | --loss-scale-window 1 | records | {FP16}
precision.hysteresis | --hysteresis 1 | records | --fp16 --initial-loss-scale 1e12
precision.fp8_format | --fp8-format e4m3 | records | {FP8}
precision.fp8_recipe | --fp8-recipe mxfp8 | records | {FP8} --fp8 hybrid
precision.fp8_margin | --fp8-margin 3 | records | {FP8} --fp8 hybrid
precision.fp8_amax_history_len | --fp8-amax-history-len 2 | said without --fp8-recipe delayed | {FP8} --fp8 hybrid
precision.fp8_amax_compute_algo | --fp8-amax-compute-algo max | said without --fp8-recipe delayed | {FP8} --fp8 hybrid
precision.first_last_layers_bf16 | --first-last-layers-bf16 | records | {FP8} --fp8 hybrid
precision.num_layers_at_start_in_bf16 | --num-layers-at-start-in-bf16 0 | records | \
{FP8} --fp8 hybrid --first-last-layers-bf16
precision.num_layers_at_end_in_bf16 | --num-layers-at-end-in-bf16 0 | records | \
{FP8} --fp8 hybrid --first-last-layers-bf16

kernels.transformer_impl | --transformer-impl transformer_engine | \
said pip install --no-build-isolation 'transformer_engine | !--device
kernels.attention_impl | --attention-impl flash | said pip install --no-build-isolation flash-attn | !--device --bf16
kernels.optimizer_impl | --optimizer-impl apex | said git clone https://github.com/NVIDIA/apex | !--device
kernels.compile_blocks | --compile-blocks on | said blocks     compiled before the first step | --skip-train
kernels.moe_grouped_gemm | --moe-grouped-gemm | said experts    torch's grouped GEMM | {MOE} --skip-train
kernels.compile_pointwise | --compile-pointwise | said pointwise functions compiled | --skip-train
kernels.compile_loss | --compile-loss | said loss       compiled | --skip-train

data.data_path | --data-path {{B}} | records | !--mock-data --data-path {{A}}
data.split | --split 50,25,25 | records | !--mock-data --data-path {{A}}
data.train_data_path | --train-data-path {{B}} | records | {FILES}
data.valid_data_path | --valid-data-path {{B}} | records | {FILES}
data.test_data_path | --test-data-path {{B}} | records | {FILES}
data.data_cache_path | --data-cache-path {{tmp}}/cache | file cache/* | {FILES}
data.dataset | --dataset sums | outcome | {EXTEND}dataset.py --vocab-size 257
data.dataset_options | --dataset-options digits=1 | records | {SUMS}
data.dataloader_type | --dataloader-type cyclic | records
data.data_sharding | --no-data-sharding | losses_on_two_ranks | --dataloader-type cyclic
data.mock_data | --mock-data | outcome | !--mock-data
data.num_workers | --num-workers 2 | readers
data.reset_position_ids | --reset-position-ids | records | {DOCUMENTS}
data.reset_attention_mask | --reset-attention-mask | records | {DOCUMENTS}
data.eod_mask_loss | --eod-mask-loss | records | {DOCUMENTS}
data.sft | --sft --sft-overlong truncate | said conversations of | {CHAT_FILES}
data.sft_tokenizer_prompt_format | --sft-tokenizer-prompt-format plain | records | {CHATS}
data.sft_packing | --no-sft-packing | records | {CHATS}
data.sft_overlong | --sft-overlong drop | records | {CHATS}
data.tokenizer_type | --tokenizer-type ByteTokenizer | outcome | !--vocab-size
data.tokenizer_model | --tokenizer-model {{tmp}}/b.model | said b.model | {SENTENCES}
data.vocab_file | --vocab-file {{tmp}}/b.json | said b.json | {GPT2}
data.merge_file | --merge-file {{tmp}}/b.txt | said b.txt | {GPT2}

checkpoint.save | --save {{tmp}}/ckpt | file ckpt/**/manifest.json
checkpoint.load | --load {{saved}} | said continuing after step 2 | --lr-decay-style constant
checkpoint.save_interval | --save-interval 1 | file ckpt/*1/manifest.json | {SAVE}
checkpoint.save_interval_minutes | --save-interval-minutes 1e-9 | file ckpt/*1/manifest.json | {SAVE}
checkpoint.async_save | --async-save | said in the background | {SAVE}
checkpoint.exit_on_save_failure | --exit-on-save-failure | failing_save | {SAVE} --async-save --save-interval 1
checkpoint.save_retain_interval | --save-retain-interval 2 | checkpoints 3 2 | {SAVE} --save-interval 1
checkpoint.no_save_optim | --no-save-optim | manifest optimizer | {SAVE}
checkpoint.no_save_rng | --no-save-rng | manifest random | {SAVE}
checkpoint.no_load_optim | --no-load-optim | records | {LOAD} --train-iters 5
checkpoint.no_load_rng | --no-load-rng | outcome | {LOAD} --seed 7
checkpoint.finetune | --finetune | records | {LOAD}
checkpoint.ckpt_step | --ckpt-step 1 | said continuing after step 1 | {LOAD}
checkpoint.exit_on_missing_checkpoint | --exit-on-missing-checkpoint | outcome | --load {{tmp}}
checkpoint.use_checkpoint_args | --use-checkpoint-args | outcome | {LOAD} !--hidden-size !--ffn-hidden-size
checkpoint.allow_changed_model | --allow-changed-model | outcome | {LOAD} --norm-epsilon 1e-3
checkpoint.allow_changed_data | --allow-changed-data | outcome | {LOAD} !--mock-data --train-data-path {{A}}
checkpoint.allow_changed_optimizer | --allow-changed-optimizer | outcome | {LOAD} --adam-beta2 0.95
checkpoint.keep_last | --keep-last 1 | checkpoints 3 1 | {SAVE} --save-interval 1

logging.log_interval | --log-interval 2 | records
logging.tensorboard_dir | --tensorboard-dir {{tmp}}/board | file board/events*
logging.wandb_project | --wandb-project p | wandb project
logging.wandb_entity | --wandb-entity e | wandb entity | --wandb-project p
logging.wandb_exp_name | --wandb-exp-name n | wandb name | --wandb-project p
logging.wandb_save_dir | --wandb-save-dir d | wandb dir | --wandb-project p
logging.logger | --logger csv | file ckpt/csv/train_loss.csv | {SAVE} {EXTEND}logger.py
logging.moe_per_layer_logging | --moe-per-layer-logging | records | {MOE}
logging.log_params_norm | --log-params-norm | records
logging.log_num_zeros_in_grad | --log-num-zeros-in-grad | records
logging.quiet | --quiet | outcome
logging.log_throughput | --log-throughput | said TFLOP/s |
logging.timing_log_level | --timing-log-level 2 | said forward-backward
logging.log_straggler | --log-straggler | outcome | --hang-timeout-seconds 0
logging.straggler_minmax_count | --straggler-minmax-count 2 | extremes | --log-straggler --global-batch-size 8
logging.profile | --profile | file ckpt/trace_rank_00000.json | {SAVE} --profile-step-start 0 --profile-step-end 1
logging.profile_step_start | --profile-step-start 1 | said trace of steps 1 to 1 | {PROFILE} --profile-step-end 2
logging.profile_step_end | --profile-step-end 2 | said trace of steps 0 to 1 | {PROFILE} --profile-step-end 1
logging.profile_ranks | --profile-ranks 0 | said trace of steps | {PROFILE} --profile-ranks 1 --profile-step-end 1
logging.profile_pipeline | --profile-pipeline | file ckpt/pipeline_profile_*.json | \
{SAVE} --profile-step-start 0 --profile-step-end 1
logging.metrics_file | --metrics-file {{tmp}}/lines.jsonl | file lines.jsonl | !--metrics-file
logging.sample_prompts | --sample-prompts 1 2 | said samples: | --tokenizer-type NullTokenizer --vocab-size 31
logging.sample_tokens | --sample-tokens 1 | outcome | --tokenizer-type NullTokenizer --vocab-size 31 --sample-prompts 1
gpu.nccl_settings | --nccl-settings NCCL_DEBUG=INFO | said --nccl-settings: no effect, as ranks communicate over gloo
gpu.nccl_communicator_config_path | --nccl-communicator-config-path {{tmp}}/none.yaml | said none.yaml cannot be read
gpu.high_priority_stream_groups | --high-priority-stream-groups dp | said --high-priority-stream-groups: no effect
gpu.gemm_sm_carveout | --gemm-sm-carveout 8 | said --gemm-sm-carveout: no effect without a GPU
gpu.tuned | --tuned {{tmp}}/none.yaml | said none.yaml cannot be read
gpu.cuda_graph_impl | --cuda-graph-impl local | said --cuda-graph-impl local
gpu.cuda_graph_warmup_steps | --cuda-graph-warmup-steps 5 | recorded_after | !--device --cuda-graph-impl local
gpu.nvtx_ranges | --nvtx-ranges | said --nvtx-ranges needs a GPU, and this run has none
gpu.record_memory_history | --record-memory-history | said --record-memory-history needs a GPU
gpu.memory_snapshot_path | --memory-snapshot-path here.pickle | snapshot
"""

"""The table of tests/test_flag_effects.py: flag_effects.txt, with the flags that its names in braces stand for."""

from __future__ import annotations

from pathlib import Path

from tests.tables import rows

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

TABLE = rows(Path(__file__).with_suffix(".txt"), {name: text for name, text in globals().items() if name.isupper()})

#!/usr/bin/env bash
# Write one file of every kind that a user may have on disk, with the checkout at the current directory (its virtual environment active):
#
#   tests/golden/make.sh OUTPUT_FOLDER
#
# The files in this folder were written by commit 2550a27, before the packages were moved. tests/test_golden.py reads them with today's code.
# They are not written again: a format that changes gets new files beside these.
set -euo pipefail
out=$(realpath -m "$1")
repository=$PWD
export OMP_NUM_THREADS=1 PYTHONPATH=$repository
mkdir -p "$out/text" "$out/json"
for document in $(seq 24); do
    for line in $(seq 8); do
        echo "Line $line of document $document: the quick brown fox counts to $((line * document))."
    done >"$out/text/document_$document.txt"
done
cd "$out"  # paths in the files are relative to it

python -m megapipe preprocess --input text --suffixes .txt --output-prefix corpus --append-eod \
    --tokenizer-type ByteTokenizer
model=(--num-layers 4 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --group-query-attention --num-query-groups 1 --seq-length 16 --normalization RMSNorm --swiglu
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0.1)
data=(--data-path corpus_text_document --split 8,2,0 --data-cache-path cache
    --tokenizer-type ByteTokenizer)
training=(--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 2 --lr-decay-style cosine --eval-iters 1
    --eval-interval 6 --log-interval 1 --seed 7 --device cpu)
run() { python -m megapipe launch --nproc-per-node 2 "$repository/pretrain_gpt.py" "$@"; }

# a checkpoint with its configuration, metrics, journal, a profile and a rollback
run "${model[@]}" "${data[@]}" "${training[@]}" --train-iters 24 --save run --save-interval 3 --keep-last 2 \
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --profile-pipeline --profile-step-start 1 --profile-step-end 3 \
    --spike-rollback 1 --spike-threshold 0.2 --spike-steps 1 --spike-window 8 --spike-limit 1 || true
# a distributed optimizer's checkpoint in another dtype, and what it continues with
run "${model[@]}" "${data[@]}" "${training[@]}" --train-iters 6 --exit-interval 3 --save sharded --use-distributed-optimizer --bf16
run "${model[@]}" "${data[@]}" "${training[@]}" --train-iters 6 --load sharded --use-distributed-optimizer --bf16 --save continued

# a run that was killed: its starts.json stays
python "$repository/pretrain_gpt.py" "${model[@]}" "${data[@]}" "${training[@]}" --train-iters 100000 --save killed --save-interval 1000 &
pid=$!
until [ -e killed/starts.json ]; do sleep 0.2; done
sleep 5
kill -9 $pid || true
wait $pid || true
find killed -type f ! -name starts.json -delete
find killed -mindepth 1 -type d -empty -delete

python "$repository/pretrain_gpt.py" "${model[@]}" "${data[@]}" "${training[@]}" --train-iters 24 --print-config >printed_config.yaml
python -m megapipe profile-layers --output layer_times.json --seconds 0.1 "${model[@]}" "${data[@]}" "${training[@]}" --train-iters 24
python -m megapipe calibrate --output hardware.yaml --seconds 4 --name here --json >json/calibrate.json

for name in 1f1b interleaved zb-v dualpipe; do
    chunks=(); case $name in interleaved | zb-v) chunks=(-v 2) ;; esac
    python -m megapipe schedule draw "$name" -p 4 -m 8 "${chunks[@]}" --csv-out "$name.csv" >/dev/null
    python -m megapipe schedule draw "$name" -p 4 -m 8 "${chunks[@]}" --lowered --csv-out "$name.lowered.csv" >/dev/null
    python -m megapipe schedule simulate "$name" -p 4 -m 8 "${chunks[@]}" --json >"json/simulate_$name.json"
done
python -m megapipe schedule check 1f1b -p 4 -m 8 --json >json/check.json
python -m megapipe schedule draw 1f1b -p 4 -m 8 --json >json/draw.json
python -m megapipe schedule compare -p 4 -m 8 --json >json/compare.json
python -m megapipe plan --gpus 16 --gpu h100 --config "$repository/configs/llama3_8b.yaml" --json >json/plan.json
python -m megapipe doctor --json >json/doctor.json || true
python -m megapipe status run --json >json/status.json || true
python -m megapipe evaluate --load run --data text/document_1.txt --json >json/evaluate.json
python "$repository/tools/inspect_checkpoint.py" run --tensors --verify --json >json/inspect_checkpoint.json
python "$repository/tools/inspect_data.py" --step 3 --world-size 1 --json "${model[@]}" "${data[@]}" "${training[@]}" --train-iters 24 >json/inspect_data.json
rm -rf text

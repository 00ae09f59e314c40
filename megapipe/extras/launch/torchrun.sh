#!/usr/bin/env bash
# Start the ranks of one node; run the same command on every node of the job. Arguments are passed to pretrain_gpt.py:
#
#   HOSTS="node1 node2" NPROC_PER_NODE=8 launch/torchrun.sh --config configs/llama3_8b.yaml \
#       --data-path /shared/data/tokens_text_document --train-iters 20000 --save /shared/8b --load /shared/8b
#
#   HOSTS            all nodes in the order of their ranks, as names or addresses that the others can reach (default: this machine)
#   NODE_RANK        index of this node in HOSTS (default: found by name or address, or from srun)
#   NPROC_PER_NODE   ranks per node (default: the number of GPUs)
#   MASTER_ADDR      address of the rendezvous (default: the first of HOSTS)
#   MASTER_PORT      port of the rendezvous (default: 29500; under SLURM derived from the job id)
#   AGENT            megapipe (`megapipe launch`, without launcher tracebacks) or torchrun
#   PYTHON           the Python to use (default: of the active virtual environment, of .venv, or python3)
#   LOG_DIR          folder for the logs of all ranks but the first of each node (default: all output goes to the terminal)
#   ELASTIC          MIN:MAX, a variable number of nodes; RDZV_ID then identifies the job. c10d numbers nodes by sorting their names
#                    as text, so HOSTS must be sorted that way (docs/launch.md)
#
# Static rendezvous: rank r runs on node r / NPROC_PER_NODE of HOSTS, as the plan expects.
set -euo pipefail

fail() {
    printf 'torchrun.sh: %s\n' "$*" >&2
    exit 2
}

root=$(readlink -f "${BASH_SOURCE[0]}") # launch/torchrun.sh is a link to the file in the package
root=${root%/megapipe/extras/launch/torchrun.sh}
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=${VIRTUAL_ENV:-$root/.venv}/bin/python
    [ -x "$python" ] || python=python3
fi
read -ra hosts <<<"${HOSTS:-}"
[ ${#hosts[@]} -gt 0 ] || hosts=("$(hostname)")

# Print the index in HOSTS of a name or address of this machine.
own_place() {
    local name index
    for name in "$(hostname)" "$(hostname -s)" "$(hostname -f 2>/dev/null || true)" $(hostname -I 2>/dev/null || true); do
        for index in "${!hosts[@]}"; do
            if [ "${hosts[$index]}" = "$name" ]; then
                printf '%s' "$index"
                return
            fi
        done
    done
}

node_rank=${NODE_RANK:-${SLURM_NODEID:-}}
if [ -z "$node_rank" ]; then
    node_rank=0
    [ ${#hosts[@]} -eq 1 ] || node_rank=$(own_place)
    [ -n "$node_rank" ] || fail "none of HOSTS (${hosts[*]}) is a name or address of this machine; set NODE_RANK"
fi
case $node_rank in '' | *[!0-9]*) fail "NODE_RANK=$node_rank is not a non-negative integer" ;; esac
[ "$node_rank" -lt ${#hosts[@]} ] || fail "NODE_RANK=$node_rank, but HOSTS lists ${#hosts[@]}: 0 .. $((${#hosts[@]} - 1))"

ranks=${NPROC_PER_NODE:-}
if [ -z "$ranks" ]; then
    ranks=$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)
    [ "$ranks" -gt 0 ] || fail "nvidia-smi shows no GPUs; set NPROC_PER_NODE to the number of ranks per node"
fi
port=${MASTER_PORT:-29500}
[ -n "${MASTER_PORT:-}" ] || [ -z "${SLURM_JOB_ID:-}" ] || port=$((20000 + SLURM_JOB_ID % 20000))

case ${AGENT:-megapipe} in
    megapipe) command=("$python" -m megapipe launch) ;;
    torchrun) command=("$python" -m torch.distributed.run) ;;
    *) fail "AGENT=$AGENT is neither megapipe nor torchrun" ;;
esac
if [ -n "${ELASTIC:-}" ]; then
    sorted=$(printf '%s\n' "${hosts[@]}" | LC_ALL=C sort | tr '\n' ' ')
    [ "${hosts[*]} " = "$sorted" ] ||
        fail "ELASTIC: c10d numbers nodes by their names as text, which gives $sorted; list HOSTS in this order, or unset ELASTIC"
    command+=(--nnodes "$ELASTIC" --rdzv-backend c10d --rdzv-id "${RDZV_ID:-${SLURM_JOB_ID:-megapipe}}"
        --rdzv-endpoint "${MASTER_ADDR:-${hosts[0]}}:$port" --local-addr "${hosts[$node_rank]}" --max-restarts 100)
    is_host=0
    [ "$node_rank" -ne 0 ] || is_host=1
    command+=(--rdzv-conf "is_host=$is_host") # the automatic detection compares host names and can fail
else
    command+=(--nnodes "${#hosts[@]}" --node-rank "$node_rank" --master-addr "${MASTER_ADDR:-${hosts[0]}}" --master-port "$port")
fi
command+=(--nproc-per-node "$ranks")
if [ -n "${LOG_DIR:-}" ] && [ "$ranks" -gt 1 ]; then # the first rank of the node writes to this script's output
    redirects=$(printf ',%d:3' $(seq 1 $((ranks - 1))))
    command+=(--log-dir "$LOG_DIR/node-$node_rank" --redirects "${redirects#,}")
fi

[ ! -f "$root/pretrain_gpt.py" ] || export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # a clone need not be installed
trap '' USR1 # inherited by Python, which an early signal would kill before it has installed its handler
exec "${command[@]}" --module megapipe pretrain "$@"

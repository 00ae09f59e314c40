# shellcheck shell=bash
# The steps of a SLURM job, sourced by pretrain.sbatch, which sets: root scripts asked cancelled LAUNCHER REQUEUE PYTHON LOG_FOLDER
# CONTAINER_IMAGE APPTAINER_IMAGE CONTAINER_MOUNTS.
#
# nodes -> progress of the run -> ranks with their logs -> forward signals -> find the first failure -> requeue
# Commands are arrays and never strings, so that user arguments are not split or expanded.

asked=${asked:-no} cancelled=${cancelled:-no}

say() { printf '== %(%H:%M:%S)T %s\n' -1 "$*"; }

fail() {
    printf 'pretrain.sbatch: %s\n' "$*" >&2
    exit 2
}

check_settings() {
    case $LAUNCHER in srun | launch) ;; *) fail "LAUNCHER=$LAUNCHER is neither srun nor launch" ;; esac
    case $REQUEUE in progress | signal | never) ;; *) fail "REQUEUE=$REQUEUE must be progress, signal or never" ;; esac
    [ -z "$CONTAINER_IMAGE" ] || [ -z "$APPTAINER_IMAGE" ] || fail "CONTAINER_IMAGE and APPTAINER_IMAGE are both set; choose one"
    ranks_per_node=${SLURM_NTASKS_PER_NODE:-}
    [ -n "$ranks_per_node" ] || fail "--ntasks-per-node is not set; it is the number of ranks per node"
}

# SLURM node names may not resolve; NodeAddr is the address that SLURM itself uses.
address_of() {
    local word
    for word in $(scontrol show node "$1" --oneliner); do
        case $word in NodeAddr=*) printf '%s' "${word#NodeAddr=}"; return ;; esac
    done
    printf '%s' "$1"
}

find_nodes() {
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    [ ${#nodes[@]} -gt 0 ] || fail "scontrol shows no nodes for $SLURM_JOB_NODELIST"
    export MASTER_ADDR=${MASTER_ADDR:-$(address_of "${nodes[0]}")}
}

find_python() {
    if [ -n "$PYTHON" ]; then
        python=$PYTHON
    elif [ -n "$CONTAINER_IMAGE$APPTAINER_IMAGE" ]; then
        python=python3
    elif [ -x "${VIRTUAL_ENV:-$root/.venv}/bin/python" ]; then
        python=${VIRTUAL_ENV:-$root/.venv}/bin/python
    elif [ ! -f "$root/pretrain_gpt.py" ] && [ -x "$root/../../../bin/python" ]; then # of the environment's site-packages
        python=$(realpath --no-symlinks "$root/../../../bin/python")
    else
        python=python3
    fi
    [ ! -f "$root/pretrain_gpt.py" ] || export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # a clone need not be installed
}

# inside: prefix of a command that runs in the container; step: srun options for it.
enter_container() {
    inside=() step=()
    local mounts=$root:$root
    [ -z "$CONTAINER_MOUNTS" ] || mounts+=,$CONTAINER_MOUNTS
    if [ -n "$APPTAINER_IMAGE" ]; then
        inside=(apptainer exec --nv --bind "$mounts" "$APPTAINER_IMAGE") # --nv: the host's driver libraries
    elif [ -n "$CONTAINER_IMAGE" ]; then
        step=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts,$LOG_FOLDER:$LOG_FOLDER" --container-workdir="$PWD")
    fi
}

# Print "step 40 of 100, ..." from the newest complete checkpoint; reports an invalid configuration before any rank starts.
read_progress() {
    local words=("${inside[@]}" "$python" -m megapipe progress --world-size "$((${#nodes[@]} * ranks_per_node))"
        --ranks-per-node "$ranks_per_node" "${arguments[@]}") line
    if [ ${#step[@]} -gt 0 ]; then
        words=(srun --nodes=1 --ntasks=1 --overlap "${step[@]}" "${words[@]}")
    fi
    line=$("${words[@]}") || return
    say "$line"
    read -r _ progress _ total _ <<<"${line//,/ }"
}

rank_command() {
    local binding=(--cpu-bind=cores)
    [ "${SLURM_GPUS_PER_NODE:-0}" = 0 ] || binding+=(--gpus-per-node="$SLURM_GPUS_PER_NODE" --gpu-bind=none)
    # --gpu-bind=none: a rank sees all GPUs of its node and uses the one of its local rank, so that NCCL can use peer-to-peer transfers.
    # --cpus-per-task: srun does not inherit it from sbatch. --distribution: consecutive ranks on each node, as the grid expects.
    command=(srun --kill-on-bad-exit=1 --distribution=block "${binding[@]}" "${step[@]}")
    if [ "$LAUNCHER" = srun ]; then
        command+=(--ntasks-per-node="$ranks_per_node" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --output="$logs/rank-%t.log"
            bash "$scripts/slurm/rank.sh" "${inside[@]}" "$python" -m megapipe pretrain "${arguments[@]}")
    else
        export HOSTS="${nodes[*]}" NPROC_PER_NODE=$ranks_per_node PYTHON=$python LOG_DIR=$logs
        command+=(--ntasks="${#nodes[@]}" --ntasks-per-node=1 --cpus-per-task="$((ranks_per_node * ${SLURM_CPUS_PER_TASK:-1}))"
            --output="$logs/node-%t.log" bash "$scripts/slurm/rank.sh" "${inside[@]}" bash "$scripts/torchrun.sh" "${arguments[@]}")
    fi
}

start_ranks() {
    num_tasks=${#nodes[@]}
    [ "$LAUNCHER" != srun ] || num_tasks=$((num_tasks * ranks_per_node))
    say "attempt $attempt on ${nodes[*]}; logs of ranks in $logs"
    printf '   '
    printf ' %q' "${command[@]}"
    printf '\n'
    ( # scancel's SIGTERM goes to all processes; this shell ends with srun, and does not pass the trap on to it
        trap : TERM
        "${command[@]}"
        printf '%s\n' "$?" >"$logs/exit-code"
    ) &
    running=$!
    local first=$logs/rank-0.log
    [ "$LAUNCHER" = srun ] || first=$logs/node-0.log
    ( # and so does this one
        trap '' TERM
        exec tail --pid="$running" --sleep-interval=0.5 --lines=+1 --follow=name --retry "$first" 2>/dev/null
    ) &
    shown=$!
}

all_ranks_listen() {
    local there=("$logs"/started-*)
    [ -e "${there[0]}" ] && [ ${#there[@]} -eq "$num_tasks" ]
}

# `wait` returns at each signal. The signal is repeated for ranks that had not installed their handler yet.
wait_for_ranks() {
    local told=no turns=0
    while kill -0 "$running" 2>/dev/null; do
        if [ "$asked" = yes ] && [ "$cancelled" = no ] && [ $((turns++ % 10)) -eq 0 ] && all_ranks_listen; then
            [ "$told" = yes ] || say "the time limit is near: all ranks are asked to save and exit"
            told=yes
            scancel --signal=USR1 "$SLURM_JOB_ID" # only to the job's steps, not to this script
        fi
        sleep 0.5 &
        wait $!
    done
    wait "$shown"
    code=$(cat "$logs/exit-code" 2>/dev/null || printf 1)
}

# Report the task that failed first, from the files ended-TASK ("time code host") that rank.sh writes.
report_failure() {
    local ended task when host of what=rank
    [ "$LAUNCHER" = srun ] || what=node
    local -a endings=()
    for ended in "$logs"/ended-*; do
        [ -e "$ended" ] || break
        read -r when of host <"$ended"
        [ "$of" = 0 ] || endings+=("$when $of $host ${ended##*-}")
    done
    if [ ${#endings[@]} -eq 0 ]; then
        say "srun ended with code $code, and no $what by itself: see what srun says above"
        return
    fi
    mapfile -t endings < <(printf '%s\n' "${endings[@]}" | sort -n)
    read -r _ of host task <<<"${endings[0]}"
    say "$what $task on $host failed first, with exit code $of; the last lines of $logs/$what-$task.log:"
    tail --lines=30 "$logs/$what-$task.log"
    say "in order: $(printf '%s\n' "${endings[@]}" | awk -v what="$what" '{ printf "%s%s %s (code %s)", sep, what, $4, $2; sep = ", " }')"
    code=$of
}

requeue_job() {
    local why=$1
    [ "$REQUEUE" != never ] || { say "not requeued: REQUEUE=never"; return; }
    [ "$REQUEUE" != signal ] || [ "$asked" = yes ] || { say "not requeued after a failure: REQUEUE=signal"; return; }
    local before=$progress
    read_progress || return
    if [ "$progress" -ge "$total" ]; then
        say "not requeued: the run is finished"
    elif [ "$progress" -le "$before" ]; then
        say "not requeued: no checkpoint was saved after step $before, where this attempt started"
    else
        say "$why after step $progress of $total: requeueing the job"
        scontrol requeue "$SLURM_JOB_ID" # which ends this script
        sleep 60
    fi
}

arguments=("$@")
check_settings
find_nodes
find_python
attempt=${SLURM_RESTART_COUNT:-0}
logs=$LOG_FOLDER/attempt-$attempt
mkdir -p "$logs" || fail "LOG_FOLDER $LOG_FOLDER cannot be created"
export MEGAPIPE_LOGS=$logs
enter_container
read_progress || exit
if [ "$progress" -ge "$total" ]; then
    say "the run is already finished"
    exit 0
fi
rank_command
start_ranks
wait_for_ranks
if [ "$cancelled" = yes ]; then
    say "cancelled"
    exit 143
elif [ "$code" != 0 ]; then
    report_failure
    [ "$code" = 2 ] || requeue_job "failed"
elif [ "$asked" = yes ]; then
    requeue_job "asked to exit"
fi
exit "$code"

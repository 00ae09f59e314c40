# shellcheck shell=bash
# The course of a SLURM job, read by pretrain.sbatch, which sets: root asked cancelled LAUNCHER REQUEUE PYTHON LOG_FOLDER
# CONTAINER_IMAGE APPTAINER_IMAGE CONTAINER_MOUNTS.
#
# nodes -> how far is the run? -> ranks, each with its log -> a signal is passed on -> whose failure was first? -> queue up again?
# Nothing here is run through a string: commands are arrays, and what the user gave stays the words that it was.

asked=${asked:-no} cancelled=${cancelled:-no}

say() { printf '== %(%H:%M:%S)T %s\n' -1 "$*"; }

fail() {
    printf 'pretrain.sbatch: %s\n' "$*" >&2
    exit 2
}

check_settings() {
    case $LAUNCHER in srun | launch) ;; *) fail "LAUNCHER=$LAUNCHER is neither srun nor launch" ;; esac
    case $REQUEUE in progress | signal | never) ;; *) fail "REQUEUE=$REQUEUE is none of progress, signal, never" ;; esac
    [ -z "$CONTAINER_IMAGE" ] || [ -z "$APPTAINER_IMAGE" ] || fail "CONTAINER_IMAGE and APPTAINER_IMAGE are both set; choose one"
    ranks_per_node=${SLURM_NTASKS_PER_NODE:-}
    [ -n "$ranks_per_node" ] || fail "--ntasks-per-node is not set: it says how many ranks a node has"
}

# Names as SLURM writes them, node[01-16], are not addresses, and need not even resolve: NodeAddr is where SLURM itself finds a node.
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
    else
        python=python3
    fi
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
}

# inside: what stands before a command that has to run in the container; step: the options of srun for it.
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

# "step 40 of 100, ..." from the newest complete checkpoint; what cannot run at all is told here, before any rank is started.
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
    # --gpu-bind=none: a rank sees all GPUs of its node and takes the one of its local rank, so that NCCL can go from one to another directly.
    # --cpus-per-task: srun does not take it over from sbatch. --distribution: ranks node by node, as the grid counts them.
    command=(srun --kill-on-bad-exit=1 --distribution=block "${binding[@]}" "${step[@]}")
    if [ "$LAUNCHER" = srun ]; then
        command+=(--ntasks-per-node="$ranks_per_node" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --output="$logs/rank-%t.log"
            "$root/launch/slurm/rank.sh" "${inside[@]}" "$python" "$root/pretrain_gpt.py" "${arguments[@]}")
    else
        export HOSTS="${nodes[*]}" NPROC_PER_NODE=$ranks_per_node PYTHON=$python LOG_DIR=$logs
        command+=(--ntasks="${#nodes[@]}" --ntasks-per-node=1 --cpus-per-task="$((ranks_per_node * ${SLURM_CPUS_PER_TASK:-1}))"
            --output="$logs/node-%t.log" "$root/launch/slurm/rank.sh" "${inside[@]}" "$root/launch/torchrun.sh" "${arguments[@]}")
    fi
}

start_ranks() {
    num_tasks=${#nodes[@]}
    [ "$LAUNCHER" != srun ] || num_tasks=$((num_tasks * ranks_per_node))
    say "attempt $attempt on ${nodes[*]}; logs of ranks in $logs"
    printf '   '
    printf ' %q' "${command[@]}"
    printf '\n'
    (
        "${command[@]}"
        printf '%s\n' "$?" >"$logs/exit-code"
    ) &
    running=$!
    local first=$logs/rank-0.log
    [ "$LAUNCHER" = srun ] || first=$logs/node-0.log
    ( # scancel's SIGTERM goes to all processes; this one ends with srun
        trap '' TERM
        exec tail --pid="$running" --sleep-interval=0.5 --lines=+1 --follow=name --retry "$first" 2>/dev/null
    ) &
    shown=$!
}

all_ranks_listen() {
    local there=("$logs"/started-*)
    [ -e "${there[0]}" ] && [ ${#there[@]} -eq "$num_tasks" ]
}

# `wait` would end at each signal. The signal is repeated: a rank that was not yet able to hear it hears it the next time.
wait_for_ranks() {
    local told=no turns=0
    while kill -0 "$running" 2>/dev/null; do
        if [ "$asked" = yes ] && [ "$cancelled" = no ] && [ $((turns++ % 10)) -eq 0 ] && all_ranks_listen; then
            [ "$told" = yes ] || say "the time limit is near: all ranks are asked to save and leave"
            told=yes
            scancel --signal=USR1 "$SLURM_JOB_ID" # of the job's steps, not of this script
        fi
        sleep 0.5 &
        wait $!
    done
    wait "$shown"
    code=$(cat "$logs/exit-code" 2>/dev/null || printf 1)
}

# The task that ended badly before all others, by what rank.sh has written down: "time code host" in ended-TASK.
tell_failure() {
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

queue_up_again() {
    local why=$1
    [ "$REQUEUE" != never ] || { say "not queued up again: REQUEUE=never"; return; }
    [ "$REQUEUE" != signal ] || [ "$asked" = yes ] || { say "not queued up again after a failure: REQUEUE=signal"; return; }
    local before=$progress
    read_progress || return
    if [ "$progress" -ge "$total" ]; then
        say "not queued up again: the run is finished"
    elif [ "$progress" -le "$before" ]; then
        say "not queued up again: no checkpoint came after step $before, where this attempt began"
    else
        say "$why after step $progress of $total: the job queues up again"
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
mkdir -p "$logs" || fail "LOG_FOLDER $LOG_FOLDER cannot be made"
export MEGAPIPE_LOGS=$logs
enter_container
read_progress || exit
if [ "$progress" -ge "$total" ]; then
    say "nothing is left to do"
    exit 0
fi
rank_command
start_ranks
wait_for_ranks
if [ "$cancelled" = yes ]; then
    say "cancelled"
    exit 143
elif [ "$code" != 0 ]; then
    tell_failure
    [ "$code" = 2 ] || queue_up_again "failed"
elif [ "$asked" = yes ]; then
    queue_up_again "asked to leave"
fi
exit "$code"

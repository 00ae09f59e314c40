#!/usr/bin/env bash
# One task of a job: run the given command (a rank or a node's launcher) and record when and how it ended. Started by job.sh.
#
# MEGAPIPE_LOGS: the folder of these records.
set -uo pipefail

# Inherited by Python, which an early signal would otherwise kill before it has installed its handler.
trap '' USR1
# The shell must not end before the command, which has its own handlers and does not inherit this trap.
trap : TERM INT
: >"$MEGAPIPE_LOGS/started-$SLURM_PROCID"

"$@"
code=$?
printf '%s %s %s\n' "$(date +%s%N)" "$code" "${SLURMD_NODENAME:-$(hostname)}" >"$MEGAPIPE_LOGS/ended-$SLURM_PROCID"
exit "$code"

#!/usr/bin/env bash
# One task of a job: runs the command given, a rank or a node's launcher, and writes down when and how it ended. Started by job.sh.
#
# MEGAPIPE_LOGS: the folder for what is written down.
set -uo pipefail

# Python inherits this and ignores the signal until it has a handler; by default it would be killed by one that comes early.
trap '' USR1
# What ends this shell would leave the command behind, which has handlers of its own; the command does not inherit this.
trap : TERM INT
: >"$MEGAPIPE_LOGS/started-$SLURM_PROCID"

"$@"
code=$?
printf '%s %s %s\n' "$(date +%s%N)" "$code" "${SLURMD_NODENAME:-$(hostname)}" >"$MEGAPIPE_LOGS/ended-$SLURM_PROCID"
exit "$code"

#!/usr/bin/env bash
# Installs what the tests need, then runs lint, types and all tests, and prints the time of each phase.
#
#   launch/test.sh [--slow] [--gpu] [--lab] [--no-install] [arguments of pytest]
#
#   --slow          also the long variants, before a release
#   --gpu           also the tests that need a CUDA device
#   --lab           also installs Debian's SLURM and munge with apt-get, which needs root, for the tests that submit a job (they bring up
#                   daemons of their own; without SLURM they are skipped)
#   --no-install    use the virtual environment as it is
#   anything else   goes to pytest, which then runs alone: launch/test.sh tests/comm -x
#
#   VENV=DIR and PYTHON=EXE as in launch/install.sh
#
# Every phase is run even if one before it failed; the exit code is 0 only if all passed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
install=yes
lab=no
options=()
selection=()
for argument in "$@"; do
    case $argument in
        --slow | --gpu) options+=("$argument") ;;
        --lab) lab=yes ;;
        --no-install) install=no ;;
        -h | --help) sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) selection+=("$argument") ;;
    esac
done

# a path given by the user is meant from where the user stands
for index in "${!selection[@]}"; do
    path=${selection[$index]%%::*}
    case $path in -* | /*) ;; *) [ ! -e "$path" ] || selection[index]=$PWD/${selection[$index]} ;; esac
done
venv=${VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
export VENV=$venv
cd "$root"

names=()
seconds=()
verdicts=()
phase() {
    local name=$1 began=$SECONDS verdict=passed
    shift
    printf '\n== %s\n' "$name"
    "$@" || verdict=FAILED
    names+=("$name")
    seconds+=($((SECONDS - began)))
    verdicts+=("$verdict")
}

report() {
    local failed=0 total=0 index
    printf '\n'
    for index in "${!names[@]}"; do
        printf '%-22s %5d s  %s\n' "${names[$index]}" "${seconds[$index]}" "${verdicts[$index]}"
        total=$((total + seconds[index]))
        [ "${verdicts[$index]}" = passed ] || failed=1
    done
    printf '%-22s %5d s\n' total "$total"
    return $failed
}

# Types take one core for half a minute, and so do the tests without torch.
check_types() { "$python" -m mypy >"$types" 2>&1; }
show_types() {
    local verdict=0
    wait $checker || verdict=$?
    cat "$types"
    return $verdict
}

# What cannot be had is skipped by the tests that need it, with the reason.
install_lab() {
    ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null || return 0
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm slurmctld slurmd munge ||
        printf 'test: SLURM could not be installed (apt-get as root, on Debian or Ubuntu); its tests are skipped\n' >&2
}

[ "$lab" = no ] || phase "install SLURM" install_lab
if [ "$install" = yes ]; then
    phase install "$root/launch/install.sh" --extras test
    [ "${verdicts[-1]}" = passed ] || { report; exit 1; }
elif [ ! -x "$venv/bin/python" ]; then
    printf 'test: there is no virtual environment at %s; leave out --no-install, or set VENV\n' "$venv" >&2
    exit 1
fi
python=$venv/bin/python

if [ ${#selection[@]} -gt 0 ]; then
    phase tests "$python" -m pytest "${options[@]}" "${selection[@]}"
else
    phase format "$python" -m ruff format --check .
    phase lint "$python" -m ruff check .
    types=$(mktemp)
    check_types &
    checker=$!
    trap 'kill $checker 2>/dev/null || true; rm -f "$types"' EXIT
    phase "tests without torch" "$python" -m pytest --torchfree "${options[@]}"
    phase types show_types
    trap 'rm -f "$types"' EXIT
    # ranks wait for each other a third of the time; what is timed, or has to come within seconds, runs alone (tests/conftest.py).
    # One thread each: two pools of threads on the same two cores took a sixth longer.
    phase "tests, two at a time" env OMP_NUM_THREADS=1 "$python" -m pytest -m "not torchfree and not alone" -n 2 --dist loadfile "${options[@]}"
    phase "tests, one at a time" "$python" -m pytest -m "alone and not torchfree" "${options[@]}"
fi
report

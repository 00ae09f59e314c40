#!/usr/bin/env bash
# Installs the test dependencies, then runs lint, type checks and tests, and prints the time of each phase.
#
#   launch/test.sh [--all] [--gpu] [--lab] [--ledger-part K] [--ledger-record] [--torch VERSION] [--no-install] [arguments of pytest]
#
#   --all           also the long tests, with new hypothesis examples for each commit. Without it the tests are the same every time; both
#                   print what they leave out, --all also the slowest tests
#   --ledger-part K one of the 20 parts (0 to 19, or all) of the ledger of combinations (tests/ledger.py), alone; with --all that
#                   part instead of the commit's, also of the tests that run by parts (tests/long_tests.txt)
#   --ledger-record write what passes of the ledger to tests/ledger.tsv; needs a checkout without changes
#   --gpu           also the tests that need a CUDA device (tools/bench/first_day.py: these alone, with the figures of the machine)
#   --lab           also install Debian's SLURM and munge with apt-get (needs root) for the tests that submit jobs to daemons
#                   that they start themselves; without SLURM these tests are skipped
#   --torch VERSION only tests that depend on torch (models, linears, parity with one process, the fake device, ...; or those
#                   given), with this torch (2.11.0) or the newest one that megapipe takes (newest), and the newest other packages.
#                   They are installed into an environment of their own, .venv-torch-VERSION or VENV, which may take gigabytes
#   --no-install    use the virtual environment as it is
#   anything else   is passed to pytest, which then runs alone: launch/test.sh tests/comm -x
#
#   VENV=DIR and PYTHON=EXE as in launch/install.sh
#
# Every phase runs even if an earlier one failed; the exit code is 0 only if all passed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
install=yes
lab=no
all=no
extras=test
options=()
selection=()
ledger=no
torch=
while [ $# -gt 0 ]; do
    argument=$1
    shift
    case $argument in
        --all | --slow) options+=(--all --durations=25 --durations-min=5); all=yes extras=test,docs ;;
        --gpu | --ledger-record) options+=("$argument") ;;
        --ledger-part) options+=("$argument" "${1:?--ledger-part needs 0 to 19, or all}"); shift; ledger=yes ;;
        --torch) torch=${1:?--torch needs a version, as in 2.11.0, or newest}; shift ;;
        --lab) lab=yes ;;
        --no-install) install=no ;;
        -h | --help) sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) selection+=("$argument") ;;
    esac
done

[ "$ledger" = no ] || [ "$all" = yes ] || selection=("$root/tests/test_ledger.py" "${selection[@]}")

# paths are relative to the caller's directory
has_paths=no
for index in "${!selection[@]}"; do
    path=${selection[$index]%%::*}
    [ ! -e "$path" ] || has_paths=yes
    case $path in -* | /*) ;; *) [ ! -e "$path" ] || selection[index]=$PWD/${selection[$index]} ;; esac
done
case $torch in
    "" | newest | [0-9]*.[0-9]*.[0-9]*) ;;
    *) printf 'test: --torch %s is not a version; give one as in 2.11.0, or newest\n' "$torch" >&2; exit 2 ;;
esac
venv=${VENV:-$root/.venv${torch:+-torch-$torch}}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
export VENV=$venv
cd "$root"

# tests that depend on the version of torch, for --torch
of_torch=(model tensor_parallel parity fake_cuda gpu cuda optimizer pipeline data_parallel extras/dry_run extras/streams/test_roofline.py
    train/test_compiled_blocks.py train/test_gpu_setup.py)

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

# The type check takes one core for a minute at first, seconds with its cache; the tests without torch run meanwhile.
check_types() { "$python" -m mypy >"$types" 2>&1; }
show_types() {
    local verdict=0
    wait $checker || verdict=$?
    cat "$types"
    return $verdict
}

# Print the version of --torch; for newest the one that pip would install within the range of pyproject.toml.
torch_version() {
    [ "$torch" = newest ] || { printf '%s\n' "$torch"; return; }
    local range
    range=$(sed -n 's/^ *"\(torch[<>=].*\)",$/\1/p' "$root/pyproject.toml")
    "${PYTHON:-python3}" -m pip install --dry-run --ignore-installed --no-deps "$range" 2>/dev/null |
        sed -n 's/^Would install .*torch-\([0-9.]*\).*/\1/p'
}

# Make the environment of --torch: that torch, the newest of all other packages.
install_torch() {
    local version constraints=$venv/torch.txt
    version=$(torch_version)
    [ -n "$version" ] || { printf 'test: pip names no newest torch; see python3 -m pip install --dry-run torch\n' >&2; return 1; }
    mkdir -p "$venv"
    printf 'torch==%s\n' "$version" >"$constraints"
    CONSTRAINTS=$constraints "$root/launch/install.sh" --extras "$extras"
}

# Run the tests of --torch, unless the environment has another version.
test_torch() {
    "$python" - "$torch" <<'PYTHON' || return 1
import platform, sys
import numpy, torch
print("torch", torch.__version__, "numpy", numpy.__version__, "Python", platform.python_version(), flush=True)
if sys.argv[1] not in ("newest", torch.__version__.split("+")[0]):
    sys.exit(f"test: --torch {sys.argv[1]}, but the environment has {torch.__version__}; set VENV to another folder")
PYTHON
    env OMP_NUM_THREADS=1 "$python" -m pytest -n 2 --dist loadfile "${options[@]}" "$@"
}

# If SLURM cannot be installed, its tests are skipped with the reason.
install_lab() {
    ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null || return 0
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm slurmctld slurmd munge ||
        printf 'test: SLURM could not be installed (apt-get as root, on Debian or Ubuntu); its tests are skipped\n' >&2
}

[ "$lab" = no ] || phase "install SLURM" install_lab
if [ "$install" = yes ] && [ -n "$torch" ]; then
    phase "install torch $torch" install_torch
    [ "${verdicts[-1]}" = passed ] || { report; exit 1; }
elif [ "$install" = yes ]; then
    phase install "$root/launch/install.sh" --extras "$extras"
    [ "${verdicts[-1]}" = passed ] || { report; exit 1; }
elif [ ! -x "$venv/bin/python" ]; then
    printf 'test: no virtual environment at %s; omit --no-install or set VENV\n' "$venv" >&2
    exit 1
fi
python=$venv/bin/python
if [ "$all" = yes ]; then
    # other examples for each commit, the same ones when a commit is tested again
    seed=$((16#$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0)))
    printf 'hypothesis seed %d (of this commit)\n' "$seed"
    options+=("--hypothesis-seed=$seed")
fi

if [ -n "$torch" ]; then
    [ "$has_paths" = yes ] || selection=("${of_torch[@]/#/$root/tests/}" "${selection[@]}")
    phase "tests, torch $torch" test_torch "${selection[@]}"
elif [ ${#selection[@]} -gt 0 ]; then
    phase tests "$python" -m pytest "${options[@]}" "${selection[@]}"
else
    phase format "$python" -m ruff format --check .
    phase lint "$python" -m ruff check .
    types=$(mktemp)
    check_types &
    checker=$!
    trap 'kill $checker 2>/dev/null || true; rm -f "$types"' EXIT
    # One thread each: two thread pools on the same two cores took a sixth longer.
    phase "tests without torch" env OMP_NUM_THREADS=1 "$python" -m pytest --phase torchfree -n 2 --dist loadfile "${options[@]}"
    phase types show_types
    trap 'rm -f "$types"' EXIT
    # Ranks wait for each other a third of the time, so two tests share two cores; where processes are started and killed they
    # wait most of it. Tests that measure time run alone (tests/conftest.py).
    phase "tests, two at a time" env OMP_NUM_THREADS=1 "$python" -m pytest --phase together -n 2 --dist loadfile "${options[@]}"
    phase "tests that wait" env OMP_NUM_THREADS=1 "$python" -m pytest --phase waiting -n 2 --dist loadfile "${options[@]}"
    phase "tests, one at a time" "$python" -m pytest --phase alone "${options[@]}"
fi
report

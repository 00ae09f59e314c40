#!/usr/bin/env bash
# Create a virtual environment and install megapipe into it with the versions in constraints.txt, which the tests use.
#
#   launch/install.sh [--extras NAME[,NAME...]]      extras of pyproject.toml: test, tokenizers, transformers, wandb, tensorboard
#
#   VENV=DIR      the virtual environment, created if missing (default: .venv in the repository)
#   PYTHON=EXE    the Python to create it with, 3.11 or newer (default: the first one found)
#
# Without an NVIDIA GPU, torch's CPU build is installed: from pip's configured index if it has one, else from download.pytorch.org if that
# is reachable, else the default build of the index. With one, the newest build that the driver can run (nvidia-smi shows its CUDA
# version): a torch for a newer CUDA would not see the GPU. Does nothing if nothing has changed.
#
#   TORCH_CUDA=cu126   the build to install, whatever the driver: cu126, cu130, ...
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
torch_index=https://download.pytorch.org/whl
torch_cpu_index=$torch_index/cpu
torch_builds="13.2 13.0 12.9 12.8 12.6" # CUDA versions for which torch has had builds, newest first
extras=

fail() {
    printf 'install: %s\n' "$*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --extras) [ $# -ge 2 ] || fail "--extras needs a name, as in --extras test"; extras=$2; shift 2 ;;
        --extras=*) extras=${1#*=}; shift ;;
        -h | --help) sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) fail "unknown argument '$1'; see --help" ;;
    esac
done

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
    done
    fail "no Python 3.11 or newer was found; install one, or set PYTHON=/path/to/python3.11 $0"
}

make_environment() {
    [ ! -x "$venv/bin/python" ] || return 0
    local python
    python=$(find_python)
    printf 'install: creating %s with %s\n' "$venv" "$("$python" --version)"
    "$python" -m venv "$venv" || fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
}

has_nvidia_gpu() {
    [ -e /proc/driver/nvidia/version ] || { command -v nvidia-smi >/dev/null 2>&1 && timeout 10 nvidia-smi -L >/dev/null 2>&1; }
}

# Print the CUDA version that the driver supports, as in 12.8; nothing if it does not say.
driver_cuda() {
    timeout 20 nvidia-smi 2>/dev/null | sed -n 's/.*CUDA\( UMD\)\{0,1\} Version: *\([0-9][0-9]*\.[0-9][0-9]*\).*/\2/p' | head -n 1
}

# Print the newest build of torch $2 that a driver for CUDA $1 can run, as in cu128. A build runs on every driver of its major version
# (12.8 on a driver for 12.2): CUDA's minor versions are compatible.
build_for() {
    local build
    for build in $torch_builds; do
        if [ "${build%%.*}" -le "${1%%.*}" ] && offered "torch==$2+cu${build/./}" --extra-index-url "$torch_index/cu${build/./}"; then
            printf 'cu%s\n' "${build/./}"
            return
        fi
    done
    return 1
}

# Print the version of the constraint "torch==X".
torch_version() {
    sed -n 's/^torch==\([^ ;+]*\).*/\1/p' "$root/constraints.txt"
}

# Succeed if pip's configured index (and those of further options) has this requirement. Downloads no wheel.
offered() {
    timeout 90 "$venv/bin/python" -m pip install --quiet --dry-run --no-deps --ignore-installed --retries 1 --timeout 15 "$@" >/dev/null 2>&1
}

reachable() {
    timeout 20 "$venv/bin/python" - "$1" >/dev/null 2>&1 <<'PYTHON'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=8)
PYTHON
}

install_torch() {
    local version
    version=$(torch_version)
    [ -n "$version" ] || fail "constraints.txt pins no torch"
    if "$venv/bin/python" -c "
import importlib.metadata as m, sys
sys.exit(m.version('torch').split('+')[0] != '$version')" >/dev/null 2>&1; then
        return
    fi
    local pip=("$venv/bin/python" -m pip install -qq -c "$root/constraints.txt") cuda='' build=${TORCH_CUDA:-}
    if [ "$(uname -s)" != Linux ]; then
        "${pip[@]}" "torch==$version"
    elif has_nvidia_gpu; then
        cuda=$(driver_cuda)
        if [ -z "$build" ] && [ -n "$cuda" ]; then
            build=$(build_for "$cuda" "$version") ||
                fail "no build of torch $version runs on this NVIDIA driver, which is for CUDA $cuda, or $torch_index cannot be reached:
update the driver, or set TORCH_CUDA to a build that you know to run (cu126, cu130)"
        fi
        printf 'install: torch %s for NVIDIA GPUs%s%s\n' "$version" "${cuda:+, the driver for CUDA $cuda}" "${build:+: $build}"
        "${pip[@]}" ${build:+--extra-index-url "$torch_index/$build"} "torch==$version${build:++$build}"
    elif offered "torch==$version+cpu"; then
        printf 'install: torch %s, the CPU build of this index\n' "$version"
        "${pip[@]}" "torch==$version+cpu"
    elif reachable "$torch_cpu_index/torch/"; then
        printf 'install: torch %s, the CPU build of %s\n' "$version" "$torch_cpu_index"
        "${pip[@]}" --extra-index-url "$torch_cpu_index" "torch==$version+cpu"
    else
        printf 'install: torch %s as this index has it; no CPU build was found, so this may bring CUDA libraries (gigabytes)\n' "$version"
        "${pip[@]}" "torch==$version"
    fi || fail "torch $version could not be installed; see pip's message above"
}

# Print a hash of everything that determines the installation.
state() {
    "$venv/bin/python" - "$root" "$extras" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(repr(sys.argv[1:]).encode())
for name in ("pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}

make_environment
stamp=$venv/megapipe-installed${extras:+-${extras//,/-}}
wanted=$(state)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi
install_torch
printf 'install: megapipe%s into %s\n' "${extras:+[$extras]}" "$venv"
"$venv/bin/python" -m pip install -qq -c "$root/constraints.txt" -e "$root${extras:+[$extras]}" ||
    fail "megapipe could not be installed; see pip's message above"
printf '%s\n' "$wanted" >"$stamp"

#!/usr/bin/env bash
# Create a virtual environment and install megapipe into it with the versions in constraints.txt, which the tests use.
#
#   launch/install.sh [--extras NAME[,NAME...]]      extras of pyproject.toml: test, tokenizers, data, transformers, wandb, tensorboard
#
#   VENV=DIR      the virtual environment, created if missing (default: .venv in the repository)
#   PYTHON=EXE    the Python to create it with, 3.11 or newer (default: the first one found)
#
# Without an NVIDIA GPU, torch's CPU build is installed: from pip's configured index if it has one, else from download.pytorch.org if that
# is reachable, else the default build of the index. With one, the default build of the index if the driver can run it (nvidia-smi
# shows its CUDA version) and it has code for the GPU, else the newest such build of download.pytorch.org. A torch for GPUs that is
# there already, such as a container's, is kept: other libraries of the container are built against it. Does nothing if nothing has
# changed.
#
#   TORCH_CUDA=cu126   the build to install, whatever the driver and whatever is there: cu126, cu130, ...
#   CONSTRAINTS=FILE   instead of constraints.txt; it pins torch
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
torch_index=https://download.pytorch.org/whl
torch_cpu_index=$torch_index/cpu
torch_builds="13.2 13.0 12.9 12.8 12.6" # CUDA versions for which torch has had builds, newest first
extras=
constraints=${CONSTRAINTS:-$root/constraints.txt}

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
    local shares=''
    if [ -n "$(torch_of "$python")" ]; then shares=--system-site-packages; fi
    "$python" -m venv $shares "$venv" || fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
}

has_nvidia_gpu() {
    [ -e /proc/driver/nvidia/version ] || { command -v nvidia-smi >/dev/null 2>&1 && timeout 10 nvidia-smi -L >/dev/null 2>&1; }
}

# Print the CUDA version that the driver supports, as in 12.8; nothing if it does not say.
driver_cuda() {
    timeout 20 nvidia-smi 2>/dev/null | sed -n 's/.*CUDA\( UMD\)\{0,1\} Version: *\([0-9][0-9]*\.[0-9][0-9]*\).*/\2/p' | head -n 1 || true
}

# Print the lowest compute capability of the GPUs, as in 9.0; nothing if nvidia-smi does not say.
capability() {
    timeout 20 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+$' | sort -n | head -n 1 || true
}

# Succeed if a build of torch for CUDA $1 runs on a driver for CUDA $2, on GPUs of compute capability $3 (empty: not known). A build runs
# on every driver of its major version (12.8 on a driver for 12.2): CUDA's minor versions are compatible. Blackwell came with CUDA 12.8;
# torch's builds since have no code for GPUs before Turing.
runs() {
    local build=${1/./} capability=${3/./}
    [ "${1%%.*}" -le "${2%%.*}" ] && { [ "${capability:-90}" -lt 100 ] || [ "$build" -ge 128 ]; } &&
        { [ "${capability:-90}" -ge 75 ] || [ "$build" -lt 128 ]; }
}

# Print the CUDA version of the default build of torch $1 in pip's configured index; nothing if it is not for CUDA. Downloads no wheel
# from an index that serves metadata.
default_cuda() {
    timeout 300 "$venv/bin/python" -m pip install --dry-run --ignore-installed --retries 1 --timeout 15 "torch==$1" 2>/dev/null |
        sed -n 's/^Would install .*nvidia-cuda-runtime\(-cu[0-9]*\)\{0,1\}-\([0-9][0-9]*\.[0-9][0-9]*\).*/\2/p' || true
}

# Print the newest build of torch $1 in torch's own index that `runs` on $2 and $3, as in cu128.
build_for() {
    local build
    for build in $torch_builds; do
        if runs "$build" "$2" "$3" && offered "torch==$1+cu${build/./}" --extra-index-url "$torch_index/cu${build/./}"; then
            printf 'cu%s\n' "${build/./}"
            return
        fi
    done
    return 1
}

# Print the version of a torch for GPUs that Python $1 can use; nothing if it has none, or one that sees no GPU where there is one.
torch_of() {
    [ -z "${TORCH_CUDA:-}" ] || return 0
    local asks=0
    if has_nvidia_gpu; then asks=1; fi
    "$1" -c "
import torch
if (torch.version.cuda or torch.version.hip) and (not $asks or torch.cuda.is_available()):
    print('torch', torch.__version__)" 2>/dev/null | sed -n 's/^torch //p' || true
}

# Succeed if torch $1 is one that megapipe works with.
supported() {
    "$venv/bin/python" - "$root/pyproject.toml" "$1" <<'PYTHON'
import re, sys, pathlib
from pip._vendor.packaging.specifiers import SpecifierSet
wanted = re.search(r'"torch([^"]*)"', pathlib.Path(sys.argv[1]).read_text())[1]
sys.exit(not SpecifierSet(wanted).contains(sys.argv[2], prereleases=True))
PYTHON
}

# Print the version of the constraint "torch==X".
torch_version() {
    sed -n 's/^torch==\([^ ;+]*\).*/\1/p' "$constraints"
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
    [ -n "$version" ] || fail "$constraints pins no torch"
    local kept build=${TORCH_CUDA:-}
    if "$venv/bin/python" -c "
import importlib.metadata as m, sys
found = m.version('torch')
sys.exit(found.split('+')[0] != '$version' or not found.endswith('$build'))" >/dev/null 2>&1; then
        return
    fi
    kept=$(torch_of "$venv/bin/python")
    if [ -n "$kept" ]; then
        supported "$kept" || fail "the torch $kept that is there already is not one that megapipe works with (see pyproject.toml):
use a newer container, or set TORCH_CUDA (cu126, cu130) to install another torch into a new VENV"
        printf 'install: torch %s, which is there already, is kept\n' "$kept"
        constraints=$venv/kept-torch.txt # the versions of the container's other packages are those that fit its torch
        printf 'torch==%s\n' "$kept" >"$constraints"
        return
    fi
    local pip=("$venv/bin/python" -m pip install -qq -c "$constraints") cuda='' capability=''
    if [ "$(uname -s)" != Linux ]; then
        "${pip[@]}" "torch==$version"
    elif has_nvidia_gpu; then
        local default='' gpu=''
        cuda=$(driver_cuda) capability=$(capability)
        if [ -z "$build" ] && [ -n "$cuda" ]; then
            default=$(default_cuda "$version") gpu=${capability:+ for GPUs of compute capability $capability}
            if [ -z "$default" ] || ! runs "$default" "$cuda" "$capability"; then
                build=$(build_for "$version" "$cuda" "$capability") ||
                    fail "no build of torch $version$gpu runs on this NVIDIA driver, which is for CUDA $cuda${default:+:
the default build of this index is for CUDA $default, and $torch_index has none or cannot be reached};
update the driver, or set TORCH_CUDA to a build that you know to run (cu126, cu130)"
            fi
        fi
        printf 'install: torch %s for NVIDIA GPUs%s%s\n' "$version" "${cuda:+, the driver for CUDA $cuda}" \
            "${build:+: $build}${default:+${build:-: the default build of this index, for CUDA $default}}"
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
    "$venv/bin/python" - "$root" "$constraints" "$extras" ${TORCH_CUDA:+"$TORCH_CUDA"} <<'PYTHON'
import hashlib, pathlib, sys
digest = hashlib.sha256(repr([sys.argv[1], *sys.argv[3:]]).encode())
for path in (pathlib.Path(sys.argv[1], "pyproject.toml"), pathlib.Path(sys.argv[2])):
    digest.update(path.read_bytes())
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
"$venv/bin/python" -m pip install -qq -c "$constraints" -e "$root${extras:+[$extras]}" ||
    fail "megapipe could not be installed; see pip's message above"
printf '%s\n' "$wanted" >"$stamp"

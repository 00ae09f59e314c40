#!/usr/bin/env bash
# Install megapipe, build a corpus, a tokenizer and token files from text on this machine, and pretrain a small GPT.
# Run it again to resume from its checkpoint.
#
#   launch/quickstart.sh [--no-install] [options] [flags of pretrain_gpt.py]
#
#   --no-install    use the virtual environment as it is
#   --help          the options (after installation)
#
#   VENV=DIR and PYTHON=EXE as in launch/install.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
install=yes
arguments=()
for argument in "$@"; do
    case $argument in
        --no-install) install=no ;;
        *) arguments+=("$argument") ;;
    esac
done

venv=${VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
export VENV=$venv

if [ "$install" = yes ]; then
    began=$SECONDS
    "$root/launch/install.sh" --extras tokenizers
    [ $((SECONDS - began)) -lt 3 ] || printf '== installed in %d s\n' $((SECONDS - began))
elif [ ! -x "$venv/bin/python" ]; then
    printf 'quickstart: no virtual environment at %s; omit --no-install or set VENV\n' "$venv" >&2
    exit 1
fi

# use the code of this clone even if the environment was created for another one
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$venv/bin/python" -m megapipe quickstart ${arguments[@]+"${arguments[@]}"}

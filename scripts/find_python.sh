#!/usr/bin/env bash
# Prints the interpreter that environments are made with: PYTHON, or the first that is usable here.
#
#   PYTHON=python3.12 scripts/find_python.sh
#
# pyenv hides interpreters that are not switched on behind a command that fails; they are found too.
set -euo pipefail

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        "$1" -c 'import sys; print(sys.executable)'
}

behind_pyenv() {
    local version
    version=$(pyenv latest "${1#python}" 2>/dev/null) &&
        PYENV_VERSION=$version pyenv which "$1" 2>/dev/null
}

candidates=(python3.11 python3.12 python3.13 python3)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
for candidate in "${candidates[@]}"; do
    usable "$candidate" && exit
done
for candidate in "${candidates[@]}"; do
    hidden=$(behind_pyenv "$candidate") && usable "$hidden" && exit
done
printf '%s\n' "setup: no Python 3.11 or newer with venv: tried ${candidates[*]}; install one (Debian:" \
    "setup: apt-get install python3 python3-venv) or set PYTHON=/path/to/python" >&2
exit 1

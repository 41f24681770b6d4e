#!/usr/bin/env bash
# Prepares $VENV (.venv unless make was given PYTHON) and the sandbox. Safe to run twice, and twice at
# once; quick when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}

say() { printf '%s\n' "setup: $*"; }
fail() { printf '%s\n' "setup: $*" >&2; exit 1; }

install_packages() {
    local pip python stamp torch
    stamp=$(cat pyproject.toml requirements.lock routing_cache/_kernel.c | sha256sum | cut -d' ' -f1)
    if [ -x "$venv/bin/agent-rl" ] && [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    python=$(bash scripts/find_python.sh)
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        say "creating $venv with $("$python" --version)"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # torch first and alone: other packages ask for ranges that would bring another build of it.
    torch=$(grep '^torch==' requirements.lock)
    say "1 of 3: installing $torch (the largest one: minutes, without a line until it is done)"
    "${pip[@]}" "$torch"
    say "2 of 3: installing the rest of requirements.lock (minutes)"
    "${pip[@]}" -r requirements.lock
    say "3 of 3: installing agent-rl itself, editable"
    "${pip[@]}" --no-deps --no-build-isolation -e .
    printf '%s\n' "$stamp" >"$venv/.stamp"
    is_fresh=1
}

install_sandbox() {
    command -v bwrap >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing bubblewrap"
        apt-get update -qq || true
        apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null && return
    fi
    say "bubblewrap is missing and cannot be installed here (that needs root and apt)."
    say "The sandbox falls back to 'unshare'; 'agent-rl doctor' says which one works."
    say "For bubblewrap, ask an administrator for: apt-get install bubblewrap"
}

: >>.setup.lock || fail "cannot write to $(pwd)"
exec 9>>.setup.lock
flock 9
is_fresh=
install_packages
install_sandbox
if [ -n "$is_fresh" ]; then
    say "done; for agent-rl in this shell: source $venv/bin/activate"
fi

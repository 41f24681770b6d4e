#!/usr/bin/env bash
# The real mini-swe-agent on our sandbox: an environment of its own (it is no dependency of ours), then
# one scripted episode against a local image. Needs the running private daemon and a package index.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/env.sh"
venv=$AGENT_RL_DOCKER_DIR/mini-venv
if ! "$venv/bin/python" -c 'import minisweagent, docker, numpy' >/dev/null 2>&1; then
  say "installing mini-swe-agent"
  "${VENV:-.venv}/bin/python" -m venv "$venv"
  "$venv/bin/pip" install -q 'mini-swe-agent>=2.4,<3' 'docker>=7.1' numpy >&2 ||
    die "mini-swe-agent could not be installed"
fi
"$venv/bin/python" "$here/mini_swe_agent_check.py"

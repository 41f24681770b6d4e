#!/usr/bin/env bash
# `make test-parallel`: every parallel layout on gloo processes of this machine, and their table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1
venv=${VENV:-.venv}
AGENT_RL_PARALLEL_TABLE=tests/agent_rl/parallel/RESULTS${venv#.venv}.md \
    "$venv/bin/python" -m pytest -m parallel tests/agent_rl/parallel "$@"

#!/usr/bin/env bash
# Shows that this tree gives the numbers of another revision: scripts/same_numbers.sh REVISION.
# Both train the repair agent for three steps on one thread, seed 0, and are compared to the last digit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
revision=${1:?"usage: scripts/same_numbers.sh REVISION"}
work=$(mktemp -d)
trap 'git worktree remove --force "$work/tree" 2>/dev/null || true; rm -rf "$work"' EXIT
git worktree add --quiet --detach "$work/tree" "$revision"
cp routing_cache/*.so "$work/tree/routing_cache/" 2>/dev/null || true
python=$PWD/${VENV:-.venv}/bin/python
train() { # TREE NAME
    (cd "$1" && PYTHONPATH=$1 OMP_NUM_THREADS=1 "$python" -c "from agent_rl.cli import main; main()" \
        train configs/repair_tiny.yaml run_root="$work" name="$2" train.steps=3 eval.num_tasks=64)
}
train "$work/tree" before
train "$PWD" after
"$python" scripts/compare_runs.py "$work/before" "$work/after"

#!/usr/bin/env bash
# Makes the policies of `agent-rl bench r3` again: a warm start, then 40 steps of training with R3.
#   scripts/bench_policies.sh [NAME ...]     default: bench_moe32 bench_moe8 bench_dense
# About 8 minutes each on one free core. Writes agent_rl/assets/NAME.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
names=("$@")
[ $# -gt 0 ] || names=(bench_moe32 bench_moe8 bench_dense)
bin=${VENV:-.venv}/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in "${names[@]}"; do
    "$bin"/agent-rl warmstart "$work/start/$name" --recipe "$name"
    "$bin"/agent-rl train configs/repair_tiny.yaml policy.path="$work/start/$name" \
        name="$name" run_root="$work/runs" train.steps=40 algorithm.groups_per_step=16 \
        eval.num_tasks=96
    "$bin"/python -m agent_rl.run.warmstart.export "$work/runs/$name" "agent_rl/assets/$name"
done

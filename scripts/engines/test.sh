#!/bin/bash
# Contract suite, kills and a 2-step training run on real servers. Fails when it cannot.
#
#   scripts/engines/test.sh [sglang] [vllm]     (default: both)
#
# Builds the pinned environments when they are absent. One server a kind serves its whole suite.
# Exclude nothing here: a missing environment must not look like a pass.
set -euo pipefail
cd "$(dirname "$0")/../.."
engines=("$@")
[ ${#engines[@]} -gt 0 ] || engines=(sglang vllm)
for engine in "${engines[@]}"; do
    scripts/engines/install.sh "$engine"
done
export OMP_NUM_THREADS=1
for engine in "${engines[@]}"; do  # one after the other: two cores carry one server
    AGENT_RL_REAL_ENGINES=$engine "${VENV:-.venv}/bin/python" -m pytest tests/agent_rl/engines/contract \
        -k real
done

#!/bin/bash
# Write tests/agent_rl/engines/recordings/ anew, from real servers running the contract suite.
#
#   scripts/engines/record.sh [sglang] [vllm]     (default: both)
set -euo pipefail
cd "$(dirname "$0")/../.."
engines=("$@")
[ ${#engines[@]} -gt 0 ] || engines=(sglang vllm)
export OMP_NUM_THREADS=1 AGENT_RL_RECORD=1
for engine in "${engines[@]}"; do
    scripts/engines/install.sh "$engine"
    AGENT_RL_REAL_ENGINES=$engine "${VENV:-.venv}/bin/python" -m pytest \
        tests/agent_rl/engines/contract/test_contract.py -k real
done

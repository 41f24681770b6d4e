#!/usr/bin/env bash
# What routing_cache claims, measured: its benchmark (bars decide), branch coverage of at least 95 %,
# and the state machine against a dictionary over 10,000 examples (about 13 minutes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 COVERAGE_FILE=build/prove_cache.coverage
mkdir -p build
python=${VENV:-.venv}/bin/python
"$python" -m routing_cache.bench --json build/cache_bench.json
"$python" -m coverage run --branch --source=routing_cache -m pytest tests/routing_cache
"$python" -m coverage report --skip-covered --fail-under=95
ROUTING_CACHE_EXAMPLES=${ROUTING_CACHE_EXAMPLES:-10000} "$python" -m pytest \
    tests/routing_cache/test_cache_model.py -m slow --durations=3

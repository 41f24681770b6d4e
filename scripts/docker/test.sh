#!/usr/bin/env bash
# `make test-docker`: engine, base image, every test that needs a daemon; stops the daemon by pid.
# Fails when any of it cannot be done. AGENT_RL_DOCKER_KEEP=1 leaves a daemon that this started running.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/env.sh"
cd "$here/../.."

was_running=0
docker version >/dev/null 2>&1 && was_running=1
finish() {
  [[ $was_running == 1 || ${AGENT_RL_DOCKER_KEEP:-0} == 1 ]] || "$here/stop.sh"
}
trap finish EXIT

"$here/start.sh" >/dev/null
"$here/base_image.sh"
python=${VENV:-.venv}/bin/python
"$python" -c 'import swebench' 2>/dev/null \
  || "$python" -m pip install --quiet --disable-pip-version-check -r requirements-eval.lock
OMP_NUM_THREADS=1 "$python" -m pytest -m docker "$@"
"$here/mini_swe_agent.sh"

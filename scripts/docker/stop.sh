#!/usr/bin/env bash
# Stops the private dockerd by the pid it wrote itself; no other daemon is touched. `--purge` removes
# its images and data too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

pidfile=$AGENT_RL_DOCKER_DIR/dockerd.pid
if [[ -s $pidfile ]]; then
  pid=$(<"$pidfile")
  # A stale file may name a process of somebody else.
  if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q -- "$pidfile"; then
    kill "$pid"
    for ((tries = 0; tries < 120; tries++)); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.25
    done
    kill -0 "$pid" 2>/dev/null && die "dockerd (pid $pid) did not stop within 30 s"
    say "dockerd stopped"
  fi
  rm -f "$pidfile"
fi
[[ ${1:-} == --purge ]] && rm -rf --one-file-system "$AGENT_RL_DOCKER_DIR"
exit 0

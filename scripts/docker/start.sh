#!/usr/bin/env bash
# Starts a private dockerd that shares nothing with a daemon of the machine: own data, own socket,
# no bridge, no firewall rules. Prints the line to export. Installs the engine through apt when it is
# missing and the user is root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

install_engine() {
  command -v dockerd >/dev/null && command -v docker >/dev/null && return
  [[ $(id -u) == 0 ]] || die "dockerd is not installed and only root can install it: apt-get install docker.io"
  command -v apt-get >/dev/null || die "dockerd is not installed and there is no apt-get: install the Docker engine"
  say "installing docker.io"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io iptables >&2
}

running() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

start_daemon() {
  running && return
  [[ $(id -u) == 0 ]] || die "a private dockerd needs root"
  mkdir -p "$AGENT_RL_DOCKER_DIR"
  local storage
  for storage in ${AGENT_RL_DOCKER_STORAGE:-overlay2 vfs}; do
    rm -f "$AGENT_RL_DOCKER_DIR/dockerd.pid"
    setsid dockerd \
      --data-root "$AGENT_RL_DOCKER_DIR/root" --exec-root "$AGENT_RL_DOCKER_DIR/exec" \
      --pidfile "$AGENT_RL_DOCKER_DIR/dockerd.pid" -H "$DOCKER_HOST" \
      --storage-driver "$storage" --bridge=none --iptables=false --ip6tables=false \
      --ip-forward=false --ip-masq=false \
      >"$AGENT_RL_DOCKER_DIR/dockerd.log" 2>&1 </dev/null &
    local pid=$! tries
    for ((tries = 0; tries < 240; tries++)); do
      running && say "dockerd is up with $storage" && return
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.25
    done
    kill "$pid" 2>/dev/null || true
    say "dockerd did not start with $storage"
  done
  tail -n 20 "$AGENT_RL_DOCKER_DIR/dockerd.log" >&2
  die "dockerd did not start; its log is $AGENT_RL_DOCKER_DIR/dockerd.log"
}

install_engine
start_daemon
echo "export DOCKER_HOST=$DOCKER_HOST"

# Where the private daemon keeps its things. Sourced by the other scripts; override before calling.
AGENT_RL_DOCKER_DIR=${AGENT_RL_DOCKER_DIR:-/opt/agent-rl-docker}
AGENT_RL_BASE_IMAGE=${AGENT_RL_BASE_IMAGE:-agent-rl/base:py}
AGENT_RL_DEBIAN_SUITE=${AGENT_RL_DEBIAN_SUITE:-bookworm}
DOCKER_HOST=unix://$AGENT_RL_DOCKER_DIR/docker.sock
export AGENT_RL_DOCKER_DIR AGENT_RL_BASE_IMAGE AGENT_RL_DEBIAN_SUITE DOCKER_HOST

say() { printf 'docker: %s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

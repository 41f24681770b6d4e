#!/usr/bin/env bash
# Makes the base image of the tests without a registry: a minimal Debian with Python, pytest and git,
# from debootstrap. Kept by the daemon, so it is made once (about a minute).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

docker image inspect "$AGENT_RL_BASE_IMAGE" >/dev/null 2>&1 && exit 0
if ! command -v debootstrap >/dev/null; then
  [[ $(id -u) == 0 ]] || die "debootstrap is missing and only root can install it"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap >&2
fi
rootfs=$(mktemp -d "$AGENT_RL_DOCKER_DIR/rootfs.XXXXXX")
trap 'rm -rf --one-file-system "$rootfs"' EXIT
say "debootstrap $AGENT_RL_DEBIAN_SUITE"
debootstrap --variant=minbase --include=python3,python3-pytest,python3-venv,git,patch,procps \
  "$AGENT_RL_DEBIAN_SUITE" "$rootfs" >"$AGENT_RL_DOCKER_DIR/debootstrap.log" 2>&1 ||
  die "debootstrap failed; its log is $AGENT_RL_DOCKER_DIR/debootstrap.log"
rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/* \
  "$rootfs"/usr/share/{doc,man,locale}
tar -C "$rootfs" --one-file-system -c . | docker import \
  -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
  -c 'CMD ["bash"]' - "$AGENT_RL_BASE_IMAGE" >&2

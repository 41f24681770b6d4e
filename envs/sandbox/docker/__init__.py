"""Sandboxes in containers, over the Docker API (Docker, Podman). Needs the ``docker`` extra."""

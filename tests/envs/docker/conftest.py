from docker_fixtures import docker_host

__all__ = ["docker_host"]

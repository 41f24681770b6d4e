"""Entry point inside the sandbox: configuration as one JSON argument, then serve."""

from __future__ import annotations

import json
from typing import Any

from . import kernel
from .job import JobConfig
from .server import ServerConfig, serve


def main(argument: str) -> None:
    """Serve until the control pipe closes; any other trouble ends the process with a trace."""
    raw: dict[str, Any] = json.loads(argument)
    limits = kernel.Limits(**raw["jobs"].pop("limits"))
    job_config = JobConfig(limits=limits, **raw["jobs"])
    binds = tuple((source, target) for source, target in raw["binds"])
    serve(ServerConfig(job_config, binds, tuple(raw["masked"])))

"""A recipe for the image that made tasks start from: this Python, git and the packages needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_DOCKERFILE = """\
# For tests that need nothing but Python packages; add what yours need beside them.
FROM python:{version}-slim
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends git patch procps \\
 && rm -rf /var/lib/apt/lists/*
COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt
"""


def write_base(folder: Path, needed: Sequence[str]) -> None:
    """Write the build context. The tests were validated with this Python and these packages."""
    folder.mkdir(parents=True, exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "Dockerfile").write_text(_DOCKERFILE.format(version=version))
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in needed))

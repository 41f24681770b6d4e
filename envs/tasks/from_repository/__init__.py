"""Tasks from any Python repository: inject bugs, keep those that its own tests notice.

``make_tasks`` reads a folder or an sdist, puts syntax-tree bugs into the source one at a time, and
keeps a bug when the repository's tests say that it is one: some fail, the others pass, and the
fix restores them all. What is kept is written as SWE-bench rows, as R2E-Gym rows, and as tasks
for a sandbox without images.
"""

from __future__ import annotations

from envs.tasks.from_repository.images import ImageReport, check_images
from envs.tasks.from_repository.make import MakeOptions, MakeReport, make_tasks
from envs.tasks.from_repository.repository import read_repository
from envs.tasks.from_repository.store import load_tasks

__all__ = [
    "ImageReport",
    "MakeOptions",
    "MakeReport",
    "check_images",
    "load_tasks",
    "make_tasks",
    "read_repository",
]

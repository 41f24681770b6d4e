"""The order in which bugs are tried: every kind and every file gets its turn."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from envs.errors import TaskError
from envs.tasks.from_repository.repository import Repository
from envs.tasks.syntax_mutations import Site, apply_site, find_sites


@dataclass(frozen=True)
class Candidate:
    """A file with one bug in it."""

    path: str
    site: Site
    content: bytes


def candidates(
    repository: Repository, seed: int, kinds: tuple[str, ...], max_per_function: int
) -> Iterator[Candidate]:
    """Yield bugs in a random order that is the same for the same seed, kinds taking turns.

    A function is tried ``max_per_function`` times at most, so that a long one does not crowd out
    the others.
    """
    rng = random.Random(seed)
    queues: dict[str, list[tuple[str, Site]]] = defaultdict(list)
    for path in repository.sources:
        try:
            sites = find_sites(repository.files[path], kinds)
        except TaskError:
            continue  # templates and files for another Python version
        for site in sites:
            queues[site.kind].append((path, site))
    for queue in queues.values():
        rng.shuffle(queue)
    tried: dict[tuple[str, str], int] = defaultdict(int)
    while queues:
        for kind in sorted(queues):
            candidate = _next(repository, queues[kind], tried, max_per_function)
            if candidate is None:
                del queues[kind]
                continue
            tried[candidate.path, candidate.site.function] += 1
            yield candidate


def _next(
    repository: Repository,
    queue: list[tuple[str, Site]],
    tried: dict[tuple[str, str], int],
    max_per_function: int,
) -> Candidate | None:
    while queue:
        path, site = queue.pop()
        if tried[path, site.function] >= max_per_function:
            continue
        content = apply_site(repository.files[path], site)
        if content is not None:
            return Candidate(path, site, content)
    return None

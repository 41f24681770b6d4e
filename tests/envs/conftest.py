"""Shared sandboxes: started once, since each job in a pool is a fresh sandbox anyway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from envs.grading.case_runner import CaseRunner
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.pool import SandboxPool


@pytest.fixture(scope="session")
def pool() -> Iterator[SandboxPool]:
    pool = SandboxPool(choose(SandboxSpec("auto")), num_workers=2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def case_runner(pool: SandboxPool) -> CaseRunner:
    return CaseRunner(pool, timeout_s=10.0, cpu_s=0.3)


@pytest.fixture(scope="session")
def suite_pool() -> Iterator[SandboxPool]:
    pool = SandboxPool(choose(SandboxSpec("auto", site_packages=True)), num_workers=2)
    yield pool
    pool.close()

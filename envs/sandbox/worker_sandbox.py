"""A sandbox with a work folder that lasts: the general path, for shells and large repositories."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from envs.base import ExecResult
from envs.errors import InfrastructureError
from envs.paths import clean_path
from envs.sandbox import jobs_client
from envs.sandbox.guest.protocol import Reply, Request
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.worker import Worker


class WorkerSandbox:
    """The ``Sandbox`` protocol over one worker. Calls are serialised; ``kill_all`` is not."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Start it. Raises InfrastructureError."""
        self._limits = spec.limits
        self._worker = Worker(spec)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def workspace(self) -> str:
        return self._worker.workspace

    def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        output_cap_bytes: int = 64 << 10,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        folder = cwd if cwd == "." else clean_path(cwd)
        job = jobs_client.exec_job(
            argv,
            timeout_s=timeout_s,
            output_cap_bytes=output_cap_bytes,
            cwd=folder,
            env=env,
            stdin=stdin,
        )
        before = self._worker.oom_kills()
        reply = self._run(*job)
        return jobs_client.exec_result(reply, self._worker.oom_kills() - before)

    def read(self, path: str) -> bytes:
        cap = 2 * self._limits.max_file_bytes
        job = jobs_client.file_job("read", clean_path(path), cap_bytes=cap)
        return jobs_client.file_result(self._run(*job), path)

    def write(self, path: str, data: bytes) -> None:
        job = jobs_client.file_job("write", clean_path(path), data)
        jobs_client.file_result(self._run(*job), path)

    def delete(self, path: str) -> None:
        job = jobs_client.file_job("delete", clean_path(path))
        jobs_client.file_result(self._run(*job), path)

    def snapshot(self) -> dict[str, bytes]:
        cap = jobs_client.SNAPSHOT_CAP_BYTES
        job = jobs_client.file_job("snapshot", ".", cap_bytes=cap)
        return jobs_client.unpack_snapshot(jobs_client.file_result(self._run(*job), "."))

    def kill_all(self) -> None:
        self._worker.kill_job()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._worker.close()

    def _run(self, request: Request, body: bytes) -> Reply:
        with self._lock:
            if self._closed:
                raise InfrastructureError("the sandbox is closed: got=a call expected=none")
            return self._worker.run(request, body)

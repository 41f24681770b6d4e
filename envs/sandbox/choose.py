"""Choice of the kind of sandbox: the one asked for, or the first that really works."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envs.errors import InfrastructureError, SandboxUnavailableError
from envs.sandbox.launch import LAUNCHERS, UNSAFE_KINDS, SandboxSpec
from envs.sandbox.worker_sandbox import WorkerSandbox

AUTO = "auto"
AUTO_ORDER = ("bubblewrap", "unshare")  # never a plain process
_PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Probe:
    """The result of trying a kind here, with the reason if it does not work."""

    kind: str
    works: bool
    reason: str = ""


def probe(kind: str) -> Probe:
    """Start a sandbox of this kind and run something in it."""
    try:
        sandbox = WorkerSandbox(SandboxSpec(kind))
    except InfrastructureError as error:
        return Probe(kind, works=False, reason=str(error))
    try:
        sandbox.write("probe", b"1")
        result = sandbox.exec(["cat", "probe"], timeout_s=_PROBE_TIMEOUT_S)
    except InfrastructureError as error:
        return Probe(kind, works=False, reason=str(error))
    finally:
        sandbox.close()
    works = result.exit_code == 0 and result.output == b"1"
    return Probe(kind, works, "" if works else f"a command in it failed: got={result}")


def choose_kind(kind: str, *, allow_unsafe: bool = False) -> str:
    """Return a key of ``LAUNCHERS`` that works on this machine.

    Raises SandboxUnavailableError with the reason for every kind tried.
    """
    if kind != AUTO and kind not in LAUNCHERS:
        raise SandboxUnavailableError(
            f"unknown sandbox kind: got={kind!r} expected one of {(AUTO, *LAUNCHERS)}"
        )
    if kind in UNSAFE_KINDS and not allow_unsafe:
        raise SandboxUnavailableError(
            f"sandbox kind {kind!r} isolates nothing: got allow_unsafe=False,"
            " expected True to run untrusted code with this process's rights"
        )
    tried: list[Probe] = []
    for one in AUTO_ORDER if kind == AUTO else (kind,):
        tried.append(probe(one))
        if tried[-1].works:
            return one
    reasons = "\n".join(f"  {result.kind}: {result.reason}" for result in tried)
    raise SandboxUnavailableError(
        f"no sandbox works here: got\n{reasons}\nexpected one that does; install bubblewrap,"
        " or allow unprivileged user namespaces"
    )


def choose(spec: SandboxSpec, *, allow_unsafe: bool = False) -> SandboxSpec:
    """Return ``spec`` with its kind settled."""
    return replace(spec, kind=choose_kind(spec.kind, allow_unsafe=allow_unsafe))

"""Command lines that start the server inside each kind of sandbox.

Root first becomes ``nobody``: code under test never runs with the kernel's user id 0, process
limits count, and files that only root may read stay unreadable even where they are mounted.
Folders that ``nobody`` could not reach (an interpreter below ``/root``) are bound beforehand, in
a mount namespace of the sandbox's own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from envs.errors import SandboxUnavailableError
from envs.sandbox.guest import job, kernel, server
from envs.sandbox.limits import SandboxLimits

NOBODY = 65534
GUEST_FOLDER = Path(server.__file__).parent
_PROJECT_ROOT = GUEST_FOLDER.parents[2]  # holds what tasks are made from: never shown
_SERVER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from guest.main import main; main(sys.argv[2])"
)
_GUEST_IN_BUBBLEWRAP = "/guest/guest"
_TMP = "/tmp"
_WORKSPACE = f"{_TMP}/workspace"
_MASKED = ("/home", "/root", "/run", "/var/tmp", _TMP, "/media", "/srv")
_KEEP_CANDIDATES = ("/mnt", "/media", "/srv", "/opt")
_ROOT_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group")

# Joins the control groups, binds the folders, becomes nobody. $1: where to bind, then the
# groups' files, --, the folders, --, the command. The shell stays as the command's parent: its
# end, and not that of whichever thread started the sandbox, is what --die-with-parent sees.
_AS_NOBODY = f"""
set -eu
keep=$1; shift
while [ "$1" != -- ]; do echo $$ > "$1"; shift; done; shift
mount -t tmpfs -o mode=755,size=64k tmpfs "$keep"
i=0
while [ "$1" != -- ]; do
  mkdir -p "$keep/$i/${{1##*/}}"; mount --rbind "$1" "$keep/$i/${{1##*/}}"
  i=$((i+1)); shift
done; shift
setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups -- "$@"
"""
_AS_ORDINARY_USER = '"$@"; exit $?'


@dataclass(frozen=True)
class SandboxSpec:
    """The sandbox to start."""

    kind: str  # a key of ``LAUNCHERS``
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    site_packages: bool = False  # whether the interpreter's installed packages are visible


@dataclass(frozen=True)
class Bind:
    """A host folder that must be readable inside, at the same path."""

    source: str  # where this process, or nobody after the binding, finds it
    target: str


@dataclass(frozen=True)
class Launch:
    """The command that starts one server."""

    argv: list[str]
    environment: dict[str, str]
    workspace: str


Launcher = Callable[[SandboxSpec, str, tuple[str, ...]], Launch]


def bubblewrap(spec: SandboxSpec, scratch: str, procs_files: tuple[str, ...]) -> Launch:
    """Launch with a root of its own, read-only system folders and every namespace of its own."""
    _require("bwrap")
    folders = _needed_folders(spec)
    binds = _binds(folders)
    argv = [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session",
        "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--hostname", "sandbox",
        "--ro-bind", "/usr", "/usr",
    ]  # fmt: skip
    for link in _ROOT_LINKS:
        if os.path.islink(link):
            argv += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            argv += ["--ro-bind", link, link]
    for path in _ETC:
        argv += ["--ro-bind-try", path, path]
    argv += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for folder in (_TMP, "/dev/shm"):
        argv += ["--size", str(spec.limits.tmp_bytes), "--tmpfs", folder]
    for bind in binds[:-1]:
        argv += ["--ro-bind", bind.source, bind.target]
    for path in _own_packages(folders):
        argv += ["--tmpfs", path, "--remount-ro", path]
    argv += ["--ro-bind", binds[-1].source, _GUEST_IN_BUBBLEWRAP, "--remount-ro", "/"]
    argv += _server_argv(spec, sys_executable(), "/guest", _WORKSPACE, visible=folders[:-1])
    return _launch(argv, spec, folders, procs_files, _WORKSPACE)


def unshare(spec: SandboxSpec, scratch: str, procs_files: tuple[str, ...]) -> Launch:
    """Launch on the host's root, read-only, home and temporary folders hidden; own namespaces."""
    _require("unshare")
    folders = _needed_folders(spec)
    binds = _binds(folders)
    argv = [
        "unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child",
        "--net", "--ipc", "--uts", "--cgroup", "--",
    ]  # fmt: skip
    executable = sys_executable()
    for bind in binds:
        if executable.startswith(f"{bind.target}/"):
            executable = bind.source + executable.removeprefix(bind.target)
            # One built with a shared library looks for it where it was installed.
            argv += ["env", f"LD_LIBRARY_PATH={bind.source}/lib"]
            break
    parent = os.path.dirname(binds[-1].source)
    masked = (*_MASKED, *_hidden_project())
    argv += _server_argv(
        spec, executable, parent, _WORKSPACE, visible=folders, binds=binds, masked=masked
    )
    return _launch(argv, spec, folders, procs_files, _WORKSPACE)


def _hidden_project() -> list[str]:
    """Return the project's own folder, unless a masked folder hides it already."""
    root = _PROJECT_ROOT
    hidden = any(root.is_relative_to(folder) for folder in _MASKED)
    return [] if hidden or root.parent == root else [str(root)]


def process(spec: SandboxSpec, scratch: str, procs_files: tuple[str, ...]) -> Launch:
    """Launch without isolation: the host's files and network are within reach."""
    workspace = f"{scratch}/workspace"
    argv = _server_argv(spec, sys_executable(), str(GUEST_FOLDER.parent), workspace, visible=())
    return Launch(argv, _environment(spec, workspace), workspace)


def plugin_folder(kind: str) -> str:
    """Return the place of the pytest plugin's folder inside a sandbox of this kind."""
    return f"{_GUEST_IN_BUBBLEWRAP if kind == 'bubblewrap' else GUEST_FOLDER}/plugin"


LAUNCHERS: Mapping[str, Launcher] = {
    "bubblewrap": bubblewrap,
    "unshare": unshare,
    "process": process,
}
UNSAFE_KINDS = frozenset({"process"})


def sys_executable() -> str:
    """Return the interpreter itself, not a virtual environment's link to it."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    return os.path.realpath(base)


def _needed_folders(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the folders of interpreter, packages if wanted, and last the guest's code."""
    prefixes = [os.path.realpath(sys.base_prefix)]
    if spec.site_packages and sys.prefix != sys.base_prefix:
        prefixes.append(sys.prefix)
    kept = [prefix for prefix in prefixes if not prefix.startswith("/usr")]
    return (*kept, str(GUEST_FOLDER))


def _own_packages(folders: tuple[str, ...]) -> list[str]:
    """Return this project's folders below a visible prefix: they hold what tasks are made from."""
    root = _PROJECT_ROOT
    names = ("agent_rl", "envs", "eval", "routing_cache")
    inside = any(root.is_relative_to(folder) for folder in folders[:-1])
    return [str(root / name) for name in names if inside and (root / name).is_dir()]


def _binds(folders: tuple[str, ...]) -> tuple[Bind, ...]:
    if os.geteuid() != 0:
        return tuple(Bind(folder, folder) for folder in folders)
    keep = _keep_folder(folders)
    return tuple(
        Bind(f"{keep}/{index}/{os.path.basename(folder)}", folder)
        for index, folder in enumerate(folders)
    )


def _keep_folder(folders: tuple[str, ...]) -> str:
    for candidate in _KEEP_CANDIDATES:
        taken = any(folder.startswith(f"{candidate}/") for folder in folders)
        if os.path.isdir(candidate) and not taken:
            return candidate
    raise SandboxUnavailableError(
        f"no folder to bind the interpreter to: got none of {_KEEP_CANDIDATES},"
        " expected one that exists and holds neither the interpreter nor this package"
    )


def _environment(spec: SandboxSpec, workspace: str) -> dict[str, str]:
    interpreter = sys.executable if spec.site_packages else sys_executable()
    return {
        "PATH": f"{os.path.dirname(interpreter)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": workspace,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same code gives the same answer in every worker
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _server_argv(
    spec: SandboxSpec,
    executable: str,
    guest_parent: str,
    workspace: str,
    *,
    visible: tuple[str, ...],
    binds: tuple[Bind, ...] = (),
    masked: tuple[str, ...] = (),
) -> list[str]:
    """Write the server's command line; ``visible`` folders stay readable.

    For ``binds`` and ``masked`` see the server."""
    limits = spec.limits
    isolated = spec.kind not in UNSAFE_KINDS
    config = server.ServerConfig(
        jobs=job.JobConfig(
            namespaces=isolated,
            workspace=workspace,
            limits=kernel.Limits(
                memory_bytes=limits.memory_bytes,
                # Outside a user namespace the limit would count the user's other processes too.
                max_processes=limits.max_processes if isolated else 0,
                max_file_bytes=limits.max_file_bytes,
                cpu_s=limits.cpu_s,
            ),
            tmp_bytes=limits.tmp_bytes,
            tmp_inodes=limits.tmp_inodes,
            environment=_environment(spec, workspace),
            keep_readable=tuple(f for f in visible if f.startswith(f"{_TMP}/")) if isolated else (),
        ),
        binds=tuple((bind.source, bind.target) for bind in binds),
        masked=masked,
    )
    text = json.dumps(asdict(config))
    return [executable, "-s", "-S", "-P", "-B", "-c", _SERVER, guest_parent, text]


def _launch(
    argv: list[str],
    spec: SandboxSpec,
    folders: tuple[str, ...],
    procs_files: tuple[str, ...],
    workspace: str,
) -> Launch:
    if os.geteuid() == 0:
        _require("setpriv")
        prefix = ["unshare", "--mount", "--propagation", "private", "--"]
        prefix += ["/bin/sh", "-c", _AS_NOBODY, "sh", _keep_folder(folders)]
        prefix += [*procs_files, "--", *folders, "--"]
    else:
        prefix = ["/bin/sh", "-c", _AS_ORDINARY_USER, "sh"]
    return Launch(prefix + argv, _environment(spec, workspace), workspace)


def _require(program: str) -> None:
    if shutil.which(program) is None:
        raise SandboxUnavailableError(
            f"{program} is not installed: got nothing on PATH, expected e.g. /usr/bin/{program}"
        )

"""Linux calls that Python 3.11 lacks: namespaces, mounts, privileges."""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_SECUREBITS = 28
_SECBITS_NO_ROOT = 0x1 | 0x2 | 0x4 | 0x8  # uid 0 earns no capabilities at exec; locked
_CAPABILITY_VERSION_3 = 0x20080522

_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Limits:
    """Limits of every process of a job. 0 leaves a limit as it is."""

    memory_bytes: int
    max_processes: int
    max_file_bytes: int
    cpu_s: int
    max_open_files: int = 256


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), f"setns({kind:#x})")


def mount(source: str, target: str, fstype: str, flags: int = 0, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {fstype or 'bind'} on {target}")


def mount_tmpfs(target: str, size_bytes: int, max_inodes: int) -> None:
    options = f"size={size_bytes},nr_inodes={max_inodes},mode=755"
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, options)


def make_read_only(target: str) -> None:
    """Remount ``target`` and everything below it read-only (Linux 5.12 or newer)."""
    attributes = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )
    _check(result, f"mount_setattr read-only on {target}")


def set_no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def set_child_subreaper() -> None:
    """Adopt orphaned descendants, so that a daemon can still be found and killed."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(CHILD_SUBREAPER)")


def set_undumpable() -> None:
    """Close this process to its peers of the same user: no ptrace, no ``/proc/PID/fd``."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(DUMPABLE)")


def drop_capabilities() -> None:
    """Give up every capability for good; being uid 0 of the user namespace earns none back."""
    _check(_libc.prctl(_PR_SET_SECUREBITS, _SECBITS_NO_ROOT, 0, 0, 0), "prctl(SECUREBITS)")
    set_no_new_privileges()
    header = _CapHeader(version=_CAPABILITY_VERSION_3, pid=0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((_CapData * 2)())), "capset")


def apply_limits(limits: Limits) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_NPROC, limits.max_processes),
        (resource.RLIMIT_FSIZE, limits.max_file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NOFILE, limits.max_open_files),
    ):
        if value:
            resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

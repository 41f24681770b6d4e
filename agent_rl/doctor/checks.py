"""Check this machine, and what a configuration still needs of it; changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from agent_rl.config.rules.training import check_training
from agent_rl.config.schema import RunConfig
from agent_rl.doctor.check import Check, Verdict, gib, refused_first
from agent_rl.doctor.image_checks import check_images
from agent_rl.doctor.needs import check_needs, check_policy, check_ports
from agent_rl.doctor.server_checks import check_servers
from envs.errors import SandboxUnavailableError
from envs.sandbox.choose import AUTO_ORDER, choose_kind, probe

_PACKAGES = ("torch", "megatron-core", "transformers", "tensorboard", "matplotlib", "pyarrow")
_LOW_DISK_BYTES = 2 << 30
_LOW_MEMORY_BYTES = 4 << 30


def check_machine() -> list[Check]:
    """Check Python, packages, cores, memory, disk, accelerator and every kind of sandbox."""
    return [check for group in (_python, _packages, _resources, _sandboxes) for check in group()]


def check_config(config: RunConfig) -> list[Check]:
    """Say what ``train`` would refuse, in its words, and what else ``config`` needs."""
    needs = (check for group in CONFIG_CHECKS for check in group(config))
    return list(refused_first(check_training(config), needs))


def _python() -> Iterator[Check]:
    yield Check("Python", "ok", sys.version.split()[0])


def _packages() -> Iterator[Check]:
    for name in _PACKAGES:
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "missing", "not installed", "make setup")


def _resources() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    verdict: Verdict = "ok" if cores >= 2 else "warning"
    yield Check("cores", verdict, str(cores), "" if cores >= 2 else "training will be slow")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    enough = memory >= _LOW_MEMORY_BYTES
    advice = "" if enough else "the embedded run needs about 4 GiB"
    yield Check("free memory", "ok" if enough else "warning", gib(memory), advice)
    free = shutil.disk_usage(Path.cwd()).free
    enough = free >= _LOW_DISK_BYTES
    yield Check(
        "free disk", "ok" if enough else "warning", gib(free), "" if enough else "free some space"
    )
    yield Check("GPU", "ok", _gpu())


def _gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "none here"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _sandboxes() -> Iterator[Check]:
    results = [probe(kind) for kind in AUTO_ORDER]
    any_works = any(result.works for result in results)
    for result in results:
        if result.works:
            yield Check(f"sandbox {result.kind}", "ok", "works")
        else:
            yield Check(
                f"sandbox {result.kind}",
                "warning" if any_works else "missing",
                result.reason.splitlines()[0],
                "apt-get install bubblewrap" if result.kind == "bubblewrap" else "",
            )


def _chosen_sandbox(config: RunConfig) -> Iterator[Check]:
    if config.sandbox.kind == "docker":
        return  # see check_images
    try:
        kind = choose_kind(config.sandbox.kind, allow_unsafe=config.sandbox.allow_unsafe)
        yield Check("sandbox.kind", "ok", f"{config.sandbox.kind} uses {kind}")
    except SandboxUnavailableError as error:
        yield Check("sandbox.kind", "missing", str(error).splitlines()[0], "see the reasons above")


def _run_root(config: RunConfig) -> Iterator[Check]:
    yield check_folder("run_root", Path(config.run_root))


def check_folder(key: str, path: Path) -> Check:
    """Check that the folder that ``key`` names can be written to, or made."""
    path = path.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if os.access(existing, os.W_OK):
        return Check(key, "ok", str(path))
    return Check(key, "missing", f"{existing} is not writable", f"set {key}=FOLDER")


CONFIG_CHECKS: tuple[Callable[[RunConfig], Iterator[Check]], ...] = (
    check_policy,
    _chosen_sandbox,
    check_images,
    _run_root,
    check_servers,
    check_needs,
    check_ports,
)

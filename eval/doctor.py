"""Check what a SWE-bench configuration still needs on this machine, before anything is started.

``agent-rl doctor CONFIG`` prints it. No image is pulled, no data set fetched, no episode played.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from agent_rl.config.reading import load_config
from agent_rl.config.rules import check_rules
from agent_rl.doctor.check import Check, counted, refused_first
from agent_rl.doctor.checks import check_folder
from agent_rl.doctor.image_checks import check_data_set
from agent_rl.doctor.needs import check_policy
from agent_rl.doctor.server_checks import check_servers
from agent_rl.errors import ConfigError
from envs.errors import InfrastructureError, TaskError
from envs.sandbox.docker.docker_py import DockerPyEngine
from envs.tasks.r2e_gym import is_row_file
from envs.tasks.swebench import SweBenchRow
from eval.config import ModelConfig, SuiteConfig
from eval.docker_command import check_architecture, check_docker, local_images
from eval.errors import HarnessError, ModelError
from eval.harness import harness_version, refuse_classic
from eval.models import load_script
from eval.models.from_config import make_model
from eval.suite import suite_rows

_INSTALL = ".venv/bin/pip install -r requirements-eval.lock"
_START_DOCKER = "start Docker, or set DOCKER_HOST to its socket"
_ANSWER_S = 10.0


def check_needs(config: SuiteConfig) -> Iterator[Check]:
    """Check the model, the rows, the harness, the daemon with its images, and where results go."""
    yield from _model(config.model)
    rows, finding = _rows(config)
    yield finding
    yield from _harness(config, rows)
    yield from _containers(config, rows)
    yield check_folder("run_root", Path(config.run_root))


def _model(config: ModelConfig) -> Iterator[Check]:
    if config.kind == "engine":
        yield from _engine(config.engine)
        return
    name = {"openai": "model endpoint", "scripted": "model.script"}[config.kind]
    try:
        if config.kind == "scripted":
            script = load_script(Path(config.script))
            yield Check(name, "ok", f"{config.script}: {counted(len(script), 'instance')}")
        else:
            asyncio.run(_ask(config))
            yield Check(name, "ok", f"{config.base_url} answers; model.name={config.name}")
    except ModelError as error:
        advice = "correct the file" if config.kind == "scripted" else "start it, or correct model.*"
        yield Check(name, "missing", str(error), advice)


async def _ask(config: ModelConfig) -> None:
    model = make_model(replace(config, timeout_s=min(_ANSWER_S, config.timeout_s)))
    try:
        await model.check()
    finally:
        await model.aclose()


def _engine(path: str) -> Iterator[Check]:
    """Check what the engine of a training configuration needs; it is not started."""
    try:
        run = load_config(path, on_this_machine=False)
    except ConfigError as error:
        yield Check("model.engine", "missing", "; ".join(error.problems), f"correct {path}")
        return
    yield from refused_first(check_rules(run), (*check_policy(run), *check_servers(run)))


def _rows(config: SuiteConfig) -> tuple[list[SweBenchRow], Check]:
    source = config.dataset.source
    if not is_row_file(source):
        return [], check_data_set("dataset", source)
    try:
        rows = suite_rows(config)
    except TaskError as error:
        verb = "correct" if Path(source).exists() else "write or copy"
        return [], Check("dataset", "missing", str(error), f"{verb} it, or set dataset.source")
    if not rows:
        return [], Check("dataset", "missing", f"{source} holds no rows", "set dataset.source")
    return rows, Check("dataset", "ok", f"{source}: {counted(len(rows), 'instance')}")


def _harness(config: SuiteConfig, rows: Sequence[SweBenchRow]) -> Iterator[Check]:
    try:
        version = harness_version(config.grading)
    except HarnessError as error:
        advice = f"{_INSTALL}, or set grading.python to an interpreter that has swebench"
        yield Check("harness", "missing", str(error), advice)
        return
    try:
        refuse_classic(rows, version)
    except HarnessError as error:
        yield Check("harness", "missing", str(error), "other rows, or set grading.python")
    else:
        yield Check("harness", "ok", f"swebench {version}")


def _containers(config: SuiteConfig, rows: Sequence[SweBenchRow]) -> Iterator[Check]:
    """Episodes need the docker package, grading the docker command; both need the daemon."""
    if importlib.util.find_spec("docker") is None:
        yield Check("docker package", "missing", "not installed", _INSTALL)
    else:
        try:
            DockerPyEngine().close()
        except InfrastructureError as error:
            yield Check("Docker daemon", "missing", str(error), _START_DOCKER)
        else:
            yield Check("Docker daemon", "ok", "up")
    try:
        check_docker()
        here = local_images() if rows else frozenset[str]()
    except HarnessError as error:
        yield Check("docker command", "missing", str(error), f"install it; {_START_DOCKER}")
        return
    yield Check("docker command", "ok", "reaches the daemon")
    if rows:
        yield from _images(config, rows, here)


def _images(
    config: SuiteConfig, rows: Sequence[SweBenchRow], here: frozenset[str]
) -> Iterator[Check]:
    absent = [row.instance_id for row in rows if not here.intersection(row.images)]
    if absent:
        detail = f"those of {len(absent)} of {counted(len(rows), 'instance')} are not here"
        advice = "pulled when the run starts; make sure that they fit the disk"
        yield Check("images", "warning", f"{detail}, first {absent[0]}", advice)
    else:
        yield Check("images", "ok", f"those of all {counted(len(rows), 'instance')} are here")
    try:
        emulated = check_architecture(config, rows)
    except HarnessError as error:
        advice = "another machine, or container.allow_emulation=true"
        yield Check("architecture", "missing", str(error), advice)
        return
    if emulated:
        detail = f"allowed{emulated}: slow, and time-outs follow"
        yield Check("architecture", "warning", detail, "images of this machine's architecture")

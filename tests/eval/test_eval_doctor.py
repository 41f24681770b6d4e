"""The doctor on a SWE-bench configuration: every part that is there, and that is not."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from eval_rows import make_row

from agent_rl.doctor.check import Check
from envs.tasks.swebench import SweBenchRow
from eval.config import ContainerConfig, DatasetConfig, GradingConfig, ModelConfig, SuiteConfig
from eval.doctor import check_needs

NOWHERE = "unix:///nonexistent/docker.sock"
DOCKER = """#!/bin/sh
case "$1" in
  version) case "$3" in *Arch*) echo amd64 ;; *) echo 20.10 ;; esac ;;
  images) echo "local/calc:1" ;;
  image) echo ARCHITECTURE ;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """``programs(name, text)`` writes a stand-in that is found before the real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", NOWHERE)  # no daemon of this machine is asked

    def write(name: str, text: str) -> Path:
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
        return folder / name

    return write


@pytest.fixture
def endpoint() -> Iterator[Callable[[int], str]]:
    """``endpoint(status)``: the address of a server that answers so."""
    servers: list[HTTPServer] = []

    def start(status: int) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def suite(tmp_path: Path, base_url: str, python: Path, *rows: SweBenchRow) -> SuiteConfig:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([dict(row.raw) for row in rows]))
    return SuiteConfig(
        run_root=str(tmp_path / "runs"),
        dataset=DatasetConfig(source=str(file)),
        model=ModelConfig(name="m", base_url=base_url),
        grading=GradingConfig(python=str(python)),
    )


def found(config: SuiteConfig) -> dict[str, Check]:
    checks = list(check_needs(config))
    for check in checks:
        assert (check.verdict == "ok") == (not check.advice), check
    return {check.name: check for check in checks}


def test_what_is_there_is_fine(tmp_path: Path, programs, endpoint) -> None:
    programs("docker", DOCKER.replace("ARCHITECTURE", "amd64"))
    python = programs("python-5", "#!/bin/sh\necho 5.0.2\n")
    checks = found(suite(tmp_path, endpoint(200), python, make_row(0), make_row(1)))
    fine = {name for name, check in checks.items() if check.verdict == "ok"}
    wanted = {"model endpoint", "dataset", "harness", "docker command", "images", "run_root"}
    assert fine == wanted
    assert checks["Docker daemon"].verdict == "missing"
    assert checks["dataset"].detail.endswith("rows.json: 2 instances")
    assert checks["harness"].detail == "swebench 5.0.2"


def test_everything_that_is_missing_is_named(tmp_path: Path, programs) -> None:
    programs("docker", "#!/bin/sh\necho 'no daemon here' >&2; exit 1\n")
    nobody = "http://127.0.0.1:1/v1"
    config = suite(tmp_path, nobody, tmp_path / "no-python", make_row(0))
    (tmp_path / "rows.json").unlink()
    checks = found(config)
    missing = {name for name, check in checks.items() if check.verdict == "missing"}
    wanted = {"model endpoint", "dataset", "harness", "Docker daemon", "docker command"}
    assert missing == wanted
    assert nobody in checks["model endpoint"].detail
    assert checks["dataset"].advice.startswith("write or copy")
    assert "no-python" in checks["harness"].detail
    assert "no daemon here" in checks["docker command"].detail


def test_a_key_that_the_endpoint_refuses(tmp_path: Path, programs, endpoint) -> None:
    programs("docker", DOCKER)
    check = found(suite(tmp_path, endpoint(401), Path("/nowhere"), make_row(0)))["model endpoint"]
    assert check.verdict == "missing"
    assert "refuses the key" in check.detail


def test_rows_that_cannot_be_used(tmp_path: Path, programs, endpoint) -> None:
    """Classic rows under a 5.x harness, images that are not here, and a damaged file."""
    programs("docker", DOCKER.replace("ARCHITECTURE", "amd64"))
    python = programs("python-5", "#!/bin/sh\necho 5.0.2\n")
    classic = make_row(1, image="", eval_script="", log_parser="", eval_type="")
    config = suite(tmp_path, endpoint(200), python, make_row(0), classic)
    checks = found(config)
    assert checks["harness"].verdict == "missing"
    assert "cannot grade classic rows" in checks["harness"].detail
    assert checks["images"].verdict == "warning"
    assert checks["images"].detail.startswith("those of 1 of 2 instances are not here")
    (tmp_path / "rows.json").write_text("{")
    checks = found(config)
    assert checks["dataset"].verdict == "missing"
    assert checks["dataset"].advice.startswith("correct it")
    named = replace(config, dataset=DatasetConfig(source="verified"))
    assert found(named)["dataset"].verdict in ("warning", "missing")  # by the package; not fetched


def test_images_of_another_architecture(tmp_path: Path, programs, endpoint) -> None:
    programs("docker", DOCKER.replace("ARCHITECTURE", "arm64"))
    config = suite(tmp_path, endpoint(200), Path("/nowhere"), make_row(0))
    assert found(config)["architecture"].verdict == "missing"
    allowed = replace(config, container=ContainerConfig(allow_emulation=True))
    assert found(allowed)["architecture"].verdict == "warning"


def test_a_script_or_an_engine_as_the_model(tmp_path: Path, programs) -> None:
    programs("docker", DOCKER)
    config = suite(tmp_path, "http://127.0.0.1:1/v1", Path("/nowhere"), make_row(0))
    script = tmp_path / "script.json"
    script.write_text('{"*": ["submit"]}')
    scripted = replace(config, model=ModelConfig(kind="scripted", script=str(script)))
    assert found(scripted)["model.script"].verdict == "ok"
    script.write_text("[]")
    assert found(scripted)["model.script"].verdict == "missing"

    run = tmp_path / "run.yaml"
    run.write_text("policy: {path: builtin:tiny_moe}\n")
    engine = replace(config, model=ModelConfig(kind="engine", engine=str(run)))
    assert found(engine)["policy.path"].verdict == "ok"
    run.write_text(f"policy: {{path: {tmp_path}/nothing}}\n")
    assert found(engine)["policy.path"].verdict == "missing"
    run.write_text("polizy: {}\n")
    assert "did you mean policy" in found(engine)["model.engine"].detail

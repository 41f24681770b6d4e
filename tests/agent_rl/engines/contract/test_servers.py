"""Server processes, the folders they are served from, and what is said when something is absent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Policies
from safetensors.torch import load_file

from agent_rl.config.schema import EngineConfig, PolicyConfig, RunConfig
from agent_rl.doctor.server_checks import check_servers
from agent_rl.engines.balanced.warm_prefixes import BLOCK_TOKENS, PrefixIndex
from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.server_fleet import ServerFleet, free_ports
from agent_rl.engines.http.server_process import (
    RestartPolicy,
    ServerProcess,
    ServerSpec,
    Supervisor,
)
from agent_rl.engines.http.serving_folder import (
    HEAD,
    prepare_serving_folder,
    serving_weights,
    write_serving_folder,
)
from agent_rl.engines.http.transport import TransportOptions
from agent_rl.engines.http.weight_reference import TransformersReference
from agent_rl.errors import EngineUnavailableError
from agent_rl.model.policies import policy_folder
from agent_rl.store.owned_folder import OwnedFolder, ownerless

_SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die": os._exit(3)
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_): pass
print("started", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server_spec(tmp_path: Path, code: str = _SERVER) -> ServerSpec:
    (port,) = free_ports(1)
    return ServerSpec(
        name="toy",
        command=(sys.executable, "-I", "-S", "-c", code, str(port)),
        url=f"http://127.0.0.1:{port}",
        health_path="/",
        log_file=tmp_path / "toy.log",
        start_timeout_s=60.0,
    )


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]
    except (ProcessLookupError, FileNotFoundError):  # it may end between the two
        return False
    return "Z" not in state


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def server_pid(spec: ServerSpec) -> int:
    import httpx

    return int(httpx.get(spec.url, trust_env=False).text)


def test_a_server_starts_logs_and_stops_with_its_whole_group(tmp_path: Path) -> None:
    spec = server_spec(tmp_path)

    async def scenario() -> int:
        process = ServerProcess(spec)
        process.start()
        await process.wait_healthy()
        pid = server_pid(spec)
        assert "started" in process.log_tail()
        await process.stop()
        assert not process.is_alive
        return pid

    wait_gone(asyncio.run(scenario()))


def test_a_server_that_ends_while_starting_is_reported_with_its_log(tmp_path: Path) -> None:
    spec = server_spec(tmp_path, "import sys; sys.exit('no such flag: --wings')")

    async def scenario() -> None:
        supervisor = Supervisor(spec)
        with pytest.raises(EngineUnavailableError, match="no such flag: --wings"):
            await supervisor.start()

    asyncio.run(scenario())


def test_a_server_dies_with_its_owner_even_by_sigkill(tmp_path: Path) -> None:
    spec = server_spec(tmp_path)
    owner_code = (
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from agent_rl.engines.http.server_process import ServerProcess, ServerSpec\n"
        f"spec = ServerSpec(name='toy', command={spec.command!r}, url={spec.url!r}, "
        f"health_path='/', log_file=Path({str(spec.log_file)!r}))\n"
        "process = ServerProcess(spec)\nprocess.start()\n"
        "asyncio.run(process.wait_healthy())\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        pid = server_pid(spec)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_gone(pid)


def test_a_server_that_ends_is_started_again_with_back_off_then_given_up(tmp_path: Path) -> None:
    spec = server_spec(tmp_path)
    restarted: list[int] = []

    async def note() -> None:
        restarted.append(server_pid(spec))

    async def scenario() -> None:
        policy = RestartPolicy(first_s=0.05, most_s=0.1, max_restarts=2)
        supervisor = Supervisor(spec, policy, note)
        await supervisor.start()
        seen = {server_pid(spec)}
        for number in (1, 2):
            os.kill(server_pid(spec), signal.SIGKILL)
            while len(restarted) < number:
                await asyncio.sleep(0.05)
            seen.add(restarted[-1])
        assert len(seen) == 3
        os.kill(server_pid(spec), signal.SIGKILL)
        while not supervisor.gave_up:
            await asyncio.sleep(0.05)
        assert supervisor.num_restarts == 2
        await supervisor.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_weights_that_a_killed_process_left_are_removed_and_nobody_elses(tmp_path: Path) -> None:
    killed, living, ours = (tmp_path / f"run-{number}" for number in (1, 2, 3))
    owner = OwnedFolder(living)
    for folder in (killed, living):
        for name in ("serving", "weights", "logs"):
            (folder / name).mkdir(parents=True)
            (folder / name / "file").touch()
    (killed / ".lock").touch()
    for folder in (killed, living):
        os.utime(folder, (0, 0))
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    config = EngineConfig(kind="sglang", dtype="float32", urls=(url,), verify_weights=False)
    policy, once = policy_folder("builtin:tiny_moe"), TransportOptions(max_attempts=1)

    async def scenario() -> None:
        fleet = ServerFleet(Deployment(config, policy, ours, transport=once))
        with pytest.raises(EngineUnavailableError):
            await fleet.start()
        for folder in (killed, ours):
            os.utime(folder, (0, 0))
        assert list(ownerless(tmp_path, "run-*")) == [killed]
        await fleet.aclose()

    asyncio.run(scenario())
    assert sorted(path.name for path in killed.iterdir()) == [".lock", "logs"]
    assert sorted(path.name for path in living.iterdir()) == [".lock", "logs", "serving", "weights"]
    os.utime(ours, (0, 0))
    assert list(ownerless(tmp_path, "run-*")) == [killed, ours]
    owner.close()


def test_served_weights_are_those_of_the_checkpoint_and_have_a_head(
    policies: Policies, tmp_path: Path
) -> None:
    on_disk = load_file(policies.before / "model.safetensors")
    fused = dict(policies.reference_before.model.named_parameters())
    assert any(name.endswith("gate_up_proj") for name in fused)
    served = serving_weights(fused)
    assert served.keys() == on_disk.keys() | {HEAD}
    for name, tensor in on_disk.items():
        assert torch.equal(served[name], tensor), name
    assert torch.equal(served[HEAD], on_disk["model.embed_tokens.weight"])
    folder = prepare_serving_folder(policies.before, tmp_path / "serving")
    assert '"tie_word_embeddings": false' in (folder / "config.json").read_text()
    assert not (folder / "generation_config.json").exists()
    assert prepare_serving_folder(folder, tmp_path / "again") == folder
    rewritten = write_serving_folder(served, tmp_path / "v1", template=policies.before)
    assert load_file(rewritten / "model.safetensors").keys() == served.keys()


def test_the_reference_scores_new_weights(policies: Policies) -> None:
    ids = np.arange(10, 30, dtype=np.int32)
    reference = TransformersReference(policies.before)
    for source in (policies.reference_after, policies.reference_before):
        weights = {n: p.detach() for n, p in source.model.named_parameters()}
        _, logprobs = source.forward(ids)
        expected = logprobs[np.arange(19), ids[1:]]
        assert np.abs(reference.score(weights, ids) - expected).max() < 1e-5


def test_the_prefix_index_knows_whole_blocks_and_forgets() -> None:
    index = PrefixIndex(2, max_blocks=4)
    ids = np.arange(3 * BLOCK_TOKENS + 5, dtype=np.int32)
    index.add(0, ids)
    assert index.warm_tokens(ids, [0, 1]) == {0: 3 * BLOCK_TOKENS, 1: 0}
    other = ids.copy()
    other[BLOCK_TOKENS + 1] = 999
    assert index.warm_tokens(other, [0]) == {0: BLOCK_TOKENS}
    index.add(0, np.arange(1000, 1000 + 3 * BLOCK_TOKENS, dtype=np.int32))
    assert index.warm_tokens(ids, [0]) == {0: 0}  # the first block was the oldest
    index.forget(0)
    assert index.warm_tokens(np.arange(1000, 1032, dtype=np.int32), [0]) == {0: 0}


def test_the_doctor_names_what_a_server_configuration_lacks(
    policies: Policies, tmp_path: Path
) -> None:
    base = RunConfig(policy=PolicyConfig(path=str(policies.before)))
    assert list(check_servers(base)) == []
    (port,) = free_ports(1)
    engine = EngineConfig(kind="sglang", urls=(f"http://127.0.0.1:{port}",))
    findings = {f.name: f for f in check_servers(replace(base, engine=engine))}
    assert findings["served model"].detail == "3 MoE layers, 4 of 16 experts per token"
    assert findings["served model's head"].verdict == "warning"
    assert findings[f"http://127.0.0.1:{port}"].verdict == "missing"
    engine = EngineConfig(kind="sglang", device="cuda", num_servers=4, tensor_parallel=64)
    findings = {f.name: f for f in check_servers(replace(base, engine=engine))}
    assert findings["GPUs for servers"].verdict == "missing"
    assert findings["GPUs for servers"].detail.endswith("256 needed by the servers")

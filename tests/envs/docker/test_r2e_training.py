"""Training on R2E-Gym rows: four images, two steps, scripted policy, the real loop and trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from docker_fixtures import LIMITS, connect
from r2e_specimens import SMALL, SPECIMENS, Specimen, make_image, make_row

from agent_rl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    TrainerConfig,
)
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.loop import LoopParts, train_steps
from agent_rl.rollout.group import GroupCollector
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.types import GenerateRequest, Group, Status, TokenIds, Trajectory
from envs.actions import R2EXml, ToolCall
from envs.images.environments import ImageEnvironments, ImageSettings
from envs.images.grading import ImageGrader
from envs.images.task import ImageTask
from envs.images.validation import ValidationCache
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.ownership import RUN_LABEL
from envs.tasks.r2e_gym import make_task
from routing_cache import RoutingCache

pytestmark = [pytest.mark.docker, pytest.mark.megatron, pytest.mark.slow]
STOP = 256
ROLES = ("solves", "breaks", "does nothing", "cheats")
WRITE = R2EXml().write


class ByteRenderer:
    """A byte is a token; 256 ends a completion."""

    stop_token_ids = (STOP,)

    def initial(self, observation: str) -> TokenIds:
        return self.observation(observation)

    def observation(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode()[:600] + b"\n", np.uint8).astype(np.int32)

    def parse(self, completion: TokenIds) -> str:
        return bytes(int(t) for t in completion if t < 256).decode()


def bash(command: str) -> str:
    return WRITE(ToolCall("execute_bash", {"cmd": command}))


def actions(specimen: Specimen, role: str) -> list[str]:
    """The whole episode of a role, without the submission."""
    path, fixed = next(iter(specimen.fix.items()))
    match role:
        case "solves":
            python = f"open({path!r}, 'w', newline='').write({fixed!r})"
            return [bash("git log --all --oneline"), bash(f"python3 - <<'END'\n{python}\nEND")]
        case "breaks":
            return [bash(f"echo 'raise ValueError' >> {path}; cat {path} | head -n 3")]
        case "cheats":
            look = "find / -name 'test_1.py' -not -path '/proc/*' 2>/dev/null; ls -d /r2e_tests"
            return [bash(look), bash("echo 'import os; os._exit(0)' > conftest.py")]
        case _:
            return ["just words"]


def script(request: GenerateRequest, turn: int) -> TokenIds:
    said = bytes(int(t) for t in request.token_ids if t < 256).decode(errors="replace")
    specimen = next(s for s in SPECIMENS if said.startswith(s.issue))
    role = ROLES[int(request.session_id.split("/")[-2])]  # …/member/attempt
    todo = [*actions(specimen, role), WRITE(ToolCall("finish", {"command": "submit"}))]
    return np.array([*todo[turn].encode(), STOP], np.int32)


class Keep:
    """Checks each step's trajectories while their rows are held."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.metrics: list[dict[str, float]] = []

    def step_done(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        for trajectory in (t for group in groups for t in group.trajectories):
            check_rows(trajectory)
        self.groups += groups
        self.metrics.append(metrics)
        return False


def check_rows(trajectory: Trajectory) -> None:
    rows = trajectory.branch.routed_experts
    assert rows is not None
    _, present = rows.gather()
    assert len(present) == len(trajectory.branch.token_ids)
    assert present[:-1].all()
    assert not present[-1], "the last sampled token was never fed forward"
    rows.verify(trajectory.branch.token_ids)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agent_rl.run.warmstart.train import TinyMoEShape, build_tiny_moe

    shape = TinyMoEShape(num_layers=2, num_experts=8, moe_top_k=2, max_positions=4096)
    folder = tmp_path_factory.mktemp("policy")
    build_tiny_moe(shape, 264, seed=0).save_pretrained(folder)
    return folder


CONFIG = RunConfig(
    agent=AgentConfig(max_turns=5, max_tokens=3000, max_new_tokens=1500, max_malformed=3),
    algorithm=AlgorithmConfig(group_size=len(ROLES), groups_per_step=2, num_mini_steps=1),
    rollout=RolloutConfig(concurrency=2),
    train=TrainConfig(steps=2),
    trainer=TrainerConfig(micro_batch_tokens=4096, num_threads=1),
)


def test_two_steps_on_four_images(docker_host: DockerHost, policy: Path, tmp_path: Path) -> None:
    from agent_rl.trainer.megatron import MegatronTrainer

    rows = [make_row(s, *make_image(docker_host, s)) for s in SPECIMENS]
    settings = ImageSettings(
        run_id="training", validations=tmp_path / "validated", options=SMALL, host_limits=LIMITS
    )
    environments = ImageEnvironments(connect(), settings)
    checked = environments.check([make_task(row) for row in rows])
    assert checked.refused == ()
    engine = ScriptedGenerator(script)
    routing = RoutingCache(engine.row_layout)
    trainer = MegatronTrainer(CONFIG, policy)
    keep = Keep()
    with ThreadPoolExecutor(2) as executor:
        collect = GroupCollector(
            generator=engine,
            cache=routing,
            renderer=ByteRenderer(),
            agent=CONFIG.agent,
            rollout=CONFIG.rollout,
            group_size=len(ROLES),
            make_env=environments.make,
            executor=executor,
        )
        loop = LoopParts(
            CONFIG, Curriculum(checked.usable, 2, 0), collect, engine, trainer, routing
        )
        asyncio.run(train_steps(loop, keep, first_step=1))
    trainer.close()
    environments.close()
    check_groups(keep.groups)
    assert [m["time_step_s"] > 0 for m in keep.metrics] == [True, True]
    assert engine.weight_version == 2
    assert engine.open_sessions == set()
    assert containers(docker_host, "training") == set()


def containers(host: DockerHost, run_id: str) -> set[str]:
    found = host.engine.list_containers(f"{RUN_LABEL}={run_id}")
    return {container.container_id for container in found}


def check_groups(groups: Sequence[Group]) -> None:
    assert {group.task_id for group in groups} == {
        specimen.image.rpartition("/")[2] for specimen in SPECIMENS
    }
    for group in groups:
        assert [t.reward for t in group.trajectories] == [1.0, 0.0, 0.0, 0.0], [
            (t.error, t.details) for t in group.trajectories
        ]
        assert {t.status for t in group.trajectories} == {Status.COMPLETED}
        solved, broke, nothing, cheated = group.trajectories
        assert solved.turns[0].observation.count("base") == 1
        assert "fix" not in solved.turns[0].observation
        assert solved.details["grade"] == "all tests as expected"
        assert broke.patch
        assert nothing.patch == b""
        assert nothing.details["grade"] == "empty patch"
        assert "test_1.py" not in cheated.turns[0].observation
        assert "No such file" in cheated.turns[0].observation
        assert cheated.details["protected_touched"] == "conftest.py"


def test_a_task_that_is_solved_already_or_whose_gold_fails_is_refused_and_remembered(
    docker_host: DockerHost, tmp_path: Path
) -> None:
    from envs.errors import TaskError

    specimen = SPECIMENS[0]
    task = make_task(make_row(specimen, *make_image(docker_host, specimen)))
    grader = ImageGrader(docker_host, SMALL)
    cache = ValidationCache(tmp_path)
    solved = replace(task, expected={"TestCalc.test_add": "PASSED"}, exact=False)
    broken = replace(task, solution=task.solution.replace(b"return 0.0", b"return 1.0"))
    for bad, said in ((solved, "solved as it stands"), (broken, "gold patch of .* fails")):
        with pytest.raises(TaskError, match=said):
            cache.check(bad, grader, "image")
        before = containers(docker_host, "tests")
        with pytest.raises(TaskError, match=said):
            cache.check(bad, NeverGrader(docker_host, SMALL), "image")
        assert containers(docker_host, "tests") == before


class NeverGrader(ImageGrader):
    def check(self, task: ImageTask):  # type: ignore[no-untyped-def]
        raise AssertionError("the cached answer was not used")

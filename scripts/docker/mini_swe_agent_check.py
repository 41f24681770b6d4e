"""Runs the real mini-swe-agent, with a scripted model, on a Docker sandbox and grades its work.

Needs mini-swe-agent and the ``docker`` extra; ``mini_swe_agent.sh`` makes an environment with both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["MSWEA_SILENT_STARTUP"] = "1"
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "envs" / "docker")]

from minisweagent import __version__  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.models.test_models import DeterministicModel, make_output  # noqa: E402
from r2e_specimens import CALC, SMALL, make_image, make_row  # noqa: E402

from envs.adapters.mini_swe_agent import SUBMIT_LINE, MiniSweEnvironment  # noqa: E402
from envs.images.grading import ImageGrader  # noqa: E402
from envs.images.prepare import ImagePreparer  # noqa: E402
from envs.patches.git_patch import extract_patch  # noqa: E402
from envs.sandbox.docker.docker_py import DockerPyEngine  # noqa: E402
from envs.sandbox.docker.docker_sandbox import DockerSandbox  # noqa: E402
from envs.sandbox.docker.host import DockerHost  # noqa: E402
from envs.tasks.r2e_gym import make_task  # noqa: E402

FIX = CALC.fix["calc/__init__.py"]
COMMANDS = (
    "git log --all --oneline; ls",
    "cd calc && cat __init__.py",
    "pwd",
    f"cat > __init__.py <<'END'\n{FIX}END",
    "sleep 60",
    f"echo {SUBMIT_LINE} && git diff --stat",
)


def main() -> int:
    host = DockerHost(DockerPyEngine(), run_id="mini-swe-agent")
    host.clean_up()
    try:
        task = make_task(make_row(CALC, *make_image(host, CALC)))
        prepared = ImagePreparer(host, SMALL).prepare(task)
        sandbox = DockerSandbox.start(host, prepared.name, SMALL)
        outputs = [make_output(f"run it: {c}", [{"command": c}]) for c in COMMANDS]
        agent = DefaultAgent(
            DeterministicModel(outputs=outputs),
            MiniSweEnvironment(sandbox, timeout=3.0),
            system_template="You work in {{cwd}} on {{system}}.",
            instance_template="Fix this: {{task}}",
            cost_limit=0.0,
        )
        ending = agent.run(task.issue)
        patch = extract_patch(sandbox, prepared.baseline)
        sandbox.close()
        score = ImageGrader(host, SMALL).grade(task, patch.data)
        told = [m for m in agent.messages if m["role"] == "user"][1:]
        checks = {
            "ended by submitting": ending["exit_status"] == "Submitted",
            "saw the base commit only": "the fix" not in told[0]["content"],
            "kept its folder": "/testbed/calc" in told[2]["content"],
            "was told of the time limit": "killed after 3 seconds" in told[4]["content"],
            "earned the reward": score.reward == 1.0,
            "left nothing": not host.engine.list_containers("agent-rl.run=mini-swe-agent"),
        }
    finally:
        host.close()
    for name, passed in checks.items():
        print(f"{'ok  ' if passed else 'FAIL'} {name}")
    print(f"mini-swe-agent {__version__}: {agent.n_calls} calls, {score.reason}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

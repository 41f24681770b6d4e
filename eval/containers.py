"""Environments for evaluation: each episode in a container of the instance's scrubbed image."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from envs.actions import FORMATS, TOOL_SETS, load_prompts
from envs.actions.container_tools import ToolSettings
from envs.actions.prompts import Prompts
from envs.base import Env
from envs.images.env import ImageEnv, ImageEnvParts
from envs.images.grading import ImageGrader
from envs.images.prepare import ImagePreparer
from envs.sandbox.docker.docker_errors import ImageMissingError, TransientDockerError
from envs.sandbox.docker.docker_py import DockerPyEngine
from envs.sandbox.docker.host import DockerHost, HostLimits
from envs.sandbox.docker.options import DockerOptions
from envs.tasks.swebench import REPOSITORY, SweBenchRow, agent_task, choose_image
from eval.config import SuiteConfig


class Containers:
    """Makes environments for instances; owns the run's containers. Thread-safe."""

    def __init__(self, config: SuiteConfig, run_id: str) -> None:
        """Remove what a killed process of this run left behind."""
        settings = config.container
        limits = HostLimits(
            max_containers=2 * config.num_workers, allow_emulation=settings.allow_emulation
        )
        self._host = DockerHost(DockerPyEngine(), run_id, limits)
        self._host.clean_up()
        options = DockerOptions(
            memory_bytes=settings.memory_bytes,
            max_processes=settings.max_processes,
            cpus=settings.cpus,
            disk_bytes=settings.disk_bytes,
            max_lifetime_s=2 * config.agent.max_seconds + 3600,
        )
        self._parts = ImageEnvParts(
            host=self._host,
            options=options,
            preparer=ImagePreparer(self._host, options),
            grader=ImageGrader(self._host, options),
            action_format=FORMATS[config.agent.action_format](),
            tools=TOOL_SETS[config.agent.tools],
            tool_settings=ToolSettings(
                command_timeout_s=settings.command_timeout_s,
                max_chars=settings.max_observation_chars,
            ),
        )

    def make_env(self, row: SweBenchRow) -> Env:
        image = choose_image(row, self._is_local)
        return ImageEnv(agent_task(row, image), self._parts)

    def pull(self, rows: Sequence[SweBenchRow]) -> str:
        """Fetch the images of ``rows``; return what is to be told about those that cannot be had.

        Their episodes fail one by one, as infrastructure. Raises a DockerError for images of
        another architecture.
        """
        with ThreadPoolExecutor(8) as pool:
            names = list(pool.map(lambda row: choose_image(row, self._is_local), rows))
        try:
            self._host.prepare_images(names)
        except (ImageMissingError, TransientDockerError) as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._host.close()

    def _is_local(self, image: str) -> bool:
        return self._host.backoff.run(lambda: self._host.engine.find_image(image)) is not None


class PromptFiller:
    """The prompts of an instance, from the configuration's file."""

    def __init__(self, config: SuiteConfig) -> None:
        self._prompts = load_prompts(config.agent.prompts)
        form = FORMATS[config.agent.action_format]()
        self._tools = form.describe(TOOL_SETS[config.agent.tools])

    @property
    def system(self) -> str:
        """The system prompt, which is the same for every instance."""
        return self._fill("").system

    def __call__(self, row: SweBenchRow) -> Prompts:
        return self._fill(row.problem_statement.strip())

    def _fill(self, issue: str) -> Prompts:
        values = {"tools": self._tools, "issue": issue, "workspace": REPOSITORY}
        return self._prompts.fill(values)

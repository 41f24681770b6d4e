"""A whole training run: evaluate, train, evaluate again, leave a folder that explains itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import orjson

from agent_rl.config.objective import advice
from agent_rl.config.schema import RunConfig
from agent_rl.errors import AgentRLError, CheckpointError
from agent_rl.loop import train_steps
from agent_rl.metrics.alarm import alarm_text, ends_run
from agent_rl.metrics.display import Display
from agent_rl.metrics.plots import plot_run
from agent_rl.metrics.sink import MetricsSink
from agent_rl.metrics.summary import Evaluation, Summary, summarize
from agent_rl.run.evaluation import evaluate, evaluation_from_json
from agent_rl.run.parts import Assembly, assemble
from agent_rl.run.resume import TaskRecord, changes_since, record_run, require_same_tasks
from agent_rl.store.run_folder import RunFolder, read_metrics, write_aside
from agent_rl.store.trajectories import write_trajectories
from agent_rl.trainer.checkpoint import CheckpointStore
from agent_rl.types import Group


async def run_training(
    config: RunConfig, folder: RunFolder, display: Display, *, other_tasks: bool = False
) -> Summary:
    """Run ``config`` in ``folder``, continuing from its newest verified checkpoint if it has one.

    Whatever ends the run keeps every completed step: the last one is saved on the way out.
    ``other_tasks`` lets a resumed run go on although its tasks have changed.
    """
    display.note(f"run folder: {folder.path}")
    for text in advice(config):
        display.note(f"warning: {text}")
    display.activity("loading engine and trainer", 0, 1)
    parts = assemble(config, on_rollout=lambda n, m: display.activity("rollout", n, m))
    try:
        run = _TrainingRun(config, folder, display, parts)
        first_step = await run.restore(other_tasks=other_tasks)
        before = await run.evaluation("before")
        with MetricsSink(folder.metrics_file, folder.tensorboard) as sink:
            run.sink = sink
            try:
                loop = replace(parts.loop, evaluate=run.heldout_metrics)
                await train_steps(loop, run, first_step=first_step)
            except asyncio.CancelledError:
                run.save_if_consistent()
                raise
            except Exception:
                run.save_after_failure()
                raise
        run.save_if_consistent()
        after = await run.evaluation("after")
        return run.finish(before, after)
    finally:
        await parts.aclose()


class _TrainingRun:
    """Observer of the loop: records steps, saves checkpoints, decides when to stop."""

    sink: MetricsSink

    def __init__(
        self, config: RunConfig, folder: RunFolder, display: Display, parts: Assembly
    ) -> None:
        self._config, self._folder, self._display, self._parts = config, folder, display, parts
        self._checkpoints = CheckpointStore(folder.checkpoints, keep_last=config.train.keep_last)
        self._step = 0  # the last completed one
        self._version = 0  # the trainer's version at its end
        self._saved_step = -1
        self._wall_s = 0.0

    @cached_property
    def _tasks(self) -> TaskRecord:
        return TaskRecord.of(self._parts.loop.curriculum.tasks)

    async def restore(self, *, other_tasks: bool = False) -> int:
        """Load the newest verified checkpoint; returns the first step to run.

        Raises CheckpointError: none can be trusted, or it is of a run with other tasks.
        """
        newest = self._checkpoints.latest()
        if newest is not None:
            for skipped in newest.skipped:
                self._display.note(f"checkpoint {skipped.name} not used: {skipped.reason}")
            for change in changes_since(newest.folder, self._config):
                self._display.note(f"not as step {newest.step} was trained: {change}")
            self._check_tasks(newest.folder, accept=other_tasks)
            trainer = self._parts.loop.trainer
            trainer.load(newest.folder)
            await self._parts.loop.engine.load_weights(
                trainer.publish_weights(), trainer.weight_version
            )
            self._step = self._saved_step = newest.step
            self._version = trainer.weight_version
            self._display.note(f"resuming after step {newest.step}")
        elif read_metrics(self._folder.metrics_file):
            self._display.note("no checkpoint was saved yet: starting again at step 1")
        self._folder.forget_after(self._step)
        if self._step == 0:
            (self._folder.path / "evaluation-before.json").unlink(missing_ok=True)
        (self._folder.path / "evaluation-after.json").unlink(missing_ok=True)
        self._wall_s = sum(row["time_step_s"] for row in read_metrics(self._folder.metrics_file))
        return self._step + 1

    def _check_tasks(self, checkpoint: Path, *, accept: bool) -> None:
        try:
            require_same_tasks(checkpoint, self._tasks)
        except CheckpointError as error:
            if not accept:
                raise
            self._display.note(f"going on with other tasks, as asked: {error}")

    def step_done(self, step: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        self._step, self._version = step, self._parts.loop.trainer.weight_version
        self._wall_s += metrics["time_step_s"]
        write_trajectories(self._folder.trajectories_file(step), step, groups)
        counted = self._parts.routing_metrics() | self._parts.engine_metrics()
        self.sink.log(step, metrics | counted)
        train = self._config.train
        if step % train.save_every == 0:
            self._save()
        self._display.step_done(step, train.steps, metrics)
        if text := alarm_text(step, metrics):
            self._display.note(text)
        return ends_run(metrics, train.stop_on_alarm) or 0 < train.max_wall_s <= self._wall_s

    def save_if_consistent(self) -> None:
        """Save the last completed step, unless the weights have moved on since."""
        unsaved = self._step > max(0, self._saved_step)
        if unsaved and self._parts.loop.trainer.weight_version == self._version:
            self._save()

    def save_after_failure(self) -> None:
        """Save as :meth:`save_if_consistent` does; trouble with it is told, never raised."""
        try:
            self.save_if_consistent()
        except (AgentRLError, OSError) as trouble:  # the failure before it is what ends the run
            self._display.note(f"step {self._step} could not be saved: {trouble}")

    async def evaluation(self, name: str) -> Evaluation:
        """Evaluate the engine's current weights, or read back what this run measured already."""
        file = self._folder.path / f"evaluation-{name}.json"
        if file.exists():
            return evaluation_from_json(orjson.loads(file.read_bytes()))
        result = await self._evaluate(f"evaluating ({name})")
        write_aside(file, orjson.dumps(asdict(result), option=orjson.OPT_INDENT_2) + b"\n")
        self._display.note(f"held-out resolve rate {name}: {result.resolve_rate:.3f}")
        return result

    async def heldout_metrics(self) -> dict[str, float]:
        """Metrics of an evaluation between steps, with the weights that the engine has now."""
        result = await self._evaluate("evaluating")
        return {
            "heldout_resolve_rate": result.resolve_rate,
            "heldout_failed": float(result.num_infrastructure),
        }

    async def _evaluate(self, activity: str) -> Evaluation:
        return await evaluate(
            self._parts.rollout,
            self._parts.heldout,
            on_progress=lambda n, m: self._display.activity(activity, n, m),
        )

    def finish(self, before: Evaluation, after: Evaluation) -> Summary:
        metrics = read_metrics(self._folder.metrics_file)
        completed = len(metrics) == self._config.train.steps  # or a time limit ended it earlier
        summary = summarize(
            self._config.name, self._config.seed, metrics, before, after, completed=completed
        )
        plot_run(
            metrics,
            self._folder.plots / "run.png",
            before=before.resolve_rate,
            after=after.resolve_rate,
            title=f"{summary.name}: {self._config.tasks.kind} tasks, seed {summary.seed}",
        )
        self._folder.write_summary(summary.to_json())
        return summary

    def _save(self) -> None:
        if self._step == self._saved_step:
            return
        self._display.activity("saving checkpoint", 0, 1)

        def write(path: Path) -> None:
            self._parts.loop.trainer.save(path)
            record_run(path, self._config, self._tasks)

        self._checkpoints.save(self._step, write)
        self._saved_step = self._step

"""A whole evaluation: generate, grade, report. Every part can be killed and run again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_rl.store.run_folder import write_aside
from agent_rl.view.record import EpisodeRecord
from envs.tasks.swebench import SweBenchRow, load_rows
from eval.config import GradingConfig, ModelConfig, SuiteConfig
from eval.containers import Containers, PromptFiller
from eval.errors import HarnessError, TooManyFailuresError
from eval.folder import EvalFolder
from eval.generation import GenerationParts, generate
from eval.grading import GradeStore, grade_predictions, known_grade
from eval.harness import (
    Grade,
    HarnessOptions,
    OfficialHarness,
    check_harness,
    foreign_images,
)
from eval.models import EngineChat, Model, OpenAIChat, ScriptedChat, load_script
from eval.predictions import Prediction, read_predictions, write_predictions
from eval.report import Report, Result, check_sum, make_result
from eval.show import write_pages


class Observer(Protocol):
    """Hears how a run gets on."""

    def stage(self, name: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Finished:
    """The results that a run leaves for a person."""

    report: Report
    folder: Path
    page: Path


def run_suite(config: SuiteConfig, observer: Observer) -> Finished:
    """Generate what is missing, grade what is not settled, write the report.

    Raises AgentRLError and EnvsError; what was done until then is kept. When too many episodes
    fail, those that did not are still graded and reported before it raises.
    """
    rows = suite_rows(config)
    version = check_harness(harness_options(config.grading))
    with EvalFolder(Path(config.run_root) / config.name) as folder:
        folder.bind(config)
        observer.stage(f"{len(rows)} instances, {config.samples} samples each, in {folder.path}")
        trouble: TooManyFailuresError | None = None
        try:
            _generate(config, folder, rows, observer)
        except TooManyFailuresError as error:
            trouble = error
        model = _model_name(config)
        finished = _grade_and_report(config, folder, rows, model, version, observer)
        if trouble is not None:
            raise trouble
        return finished


def grade_elsewhere(
    config: SuiteConfig, predictions: Sequence[Path], observer: Observer
) -> Finished:
    """Grade predictions made by another tool: one file per sample. Raises PredictionsError."""
    rows = suite_rows(config)
    version = check_harness(harness_options(config.grading))
    read = [read_predictions(file) for file in predictions]
    names = sorted({p.model_name for sample in read for p in sample.values()})
    with EvalFolder(Path(config.run_root) / config.name) as folder:
        for number, sample in enumerate(read):
            ended = [_with_newline(prediction) for prediction in sample.values()]
            write_predictions(folder.predictions_file(number), ended)
        return _grade_and_report(config, folder, rows, ", ".join(names), version, observer)


def gold_predictions(rows: Sequence[SweBenchRow]) -> list[Prediction]:
    """The data set's own fixes: what a working set-up must resolve."""
    return [Prediction(row.instance_id, "gold", row.patch) for row in rows]


def report_only(config: SuiteConfig) -> Finished:
    """The report of a run as far as it got; starts nothing."""
    rows = suite_rows(config)
    with EvalFolder(Path(config.run_root) / config.name) as folder:
        stored: list[dict[str, Grade]] = []
        names: set[str] = set()
        for number in range(config.samples):
            store, found = GradeStore(folder.grades(number)), _predictions(folder, number)
            names |= {prediction.model_name for prediction in found.values()}
            known = {
                row.instance_id: known_grade(row, found[row.instance_id], store)
                for row in rows
                if row.instance_id in found
            }
            stored.append({key: grade for key, grade in known.items() if grade is not None})
        model = ", ".join(sorted(names)) or _model_name(config)
        return _report(config, folder, rows, stored, model, "")


def suite_rows(config: SuiteConfig) -> list[SweBenchRow]:
    """The instances asked for, in the data set's order. Raises TaskError."""
    dataset = config.dataset
    rows = load_rows(dataset.source, dataset.split, dataset.instance_ids)
    return rows[: dataset.max_instances] if dataset.max_instances else rows


def make_model(config: ModelConfig, stop: Sequence[str] = (), system_prompt: str = "") -> Model:
    """The model that a configuration names. ``system_prompt`` is for engines whose renderer puts
    it in; others find it in the dialogue. Raises ModelError, ConfigError."""
    if config.kind == "scripted":
        return ScriptedChat(load_script(Path(config.script)), config.name or "scripted")
    if config.kind == "engine":
        return _engine_model(config, system_prompt)
    return OpenAIChat(
        config.name,
        config.base_url,
        api_key=os.environ.get(config.api_key_env, ""),
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        stop=stop,
        timeout_s=config.timeout_s,
        max_retries=config.max_retries,
        keep_thinking=config.keep_thinking,
    )


def _engine_model(config: ModelConfig, system_prompt: str) -> Model:
    from agent_rl.config.reading import load_config
    from agent_rl.engines.configured import build_engine
    from agent_rl.model.policies import policy_folder
    from agent_rl.run.parts import RENDERERS

    run = load_config(config.engine)
    policy = policy_folder(run.policy.path)
    has_template = run.agent.renderer == "chat_template"
    if has_template:
        from agent_rl.rollout.template import TemplateRenderer

        limit = run.agent.max_observation_tokens
        renderer = TemplateRenderer.load(policy, limit, system_prompt=system_prompt)
    else:
        renderer = RENDERERS[run.agent.renderer](run, policy)
    return EngineChat(
        build_engine(run, policy),
        renderer,
        name=config.name or run.name,
        max_tokens=run.agent.max_tokens,
        max_new_tokens=min(config.max_new_tokens, run.agent.max_new_tokens),
        temperature=config.temperature,
        seed=run.seed,
        renders_system=has_template,
    )


def _generate(
    config: SuiteConfig, folder: EvalFolder, rows: Sequence[SweBenchRow], observer: Observer
) -> None:
    open_rows = [
        row
        for row in rows
        if any(row.instance_id not in _predictions(folder, n) for n in range(config.samples))
    ]
    if not open_rows:
        return
    observer.stage("playing episodes")
    containers = Containers(config, folder.run_id)
    executor = ThreadPoolExecutor(config.num_workers, thread_name_prefix="environment")
    try:
        if missing := containers.pull(open_rows):
            observer.stage(missing)
        asyncio.run(_play(config, folder, rows, containers, executor, observer))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        containers.close()


async def _play(
    config: SuiteConfig,
    folder: EvalFolder,
    rows: Sequence[SweBenchRow],
    containers: Containers,
    executor: ThreadPoolExecutor,
    observer: Observer,
) -> None:
    filler = PromptFiller(config)
    model = make_model(config.model, system_prompt=filler.system)
    parts = GenerationParts(model, containers.make_env, filler, executor)

    def on_episode(record: EpisodeRecord, done: int, total: int) -> None:
        observer.progress(f"{record.task_id}: {record.stop_reason}", done, total)

    try:
        await generate(config, folder, rows, parts, on_episode)
    finally:
        await model.aclose()


def _grade_and_report(
    config: SuiteConfig,
    folder: EvalFolder,
    rows: Sequence[SweBenchRow],
    model: str,
    version: str,
    observer: Observer,
) -> Finished:
    refuse_classic(rows, version)
    emulated = check_architecture(config, rows)
    grades: list[dict[str, Grade]] = []
    for number in range(config.samples):
        observer.stage(f"grading sample {number} with swebench {version}")
        harness = OfficialHarness(
            folder.harness(number),
            f"{folder.run_id}-{number}",
            harness_options(config.grading),
        )
        grades.append(
            grade_predictions(
                rows,
                _predictions(folder, number),
                harness,
                GradeStore(folder.grades(number)),
                redo_timeouts=config.grading.redo_timeouts,
                progress=lambda done, total: observer.progress("graded", done, total),
            )
        )
    return _report(config, folder, rows, grades, model, f"swebench {version}{emulated}")


def _report(
    config: SuiteConfig,
    folder: EvalFolder,
    rows: Sequence[SweBenchRow],
    grades: Sequence[Mapping[str, Grade]],
    model: str,
    harness: str,
) -> Finished:
    episodes: list[tuple[Result, EpisodeRecord | None, Grade | None]] = []
    for row in rows:
        for number, graded in enumerate(grades):
            record, grade = folder.episode(number, row.instance_id), graded.get(row.instance_id)
            episodes.append((make_result(row, number, record, grade), record, grade))
    report = Report(
        name=config.name,
        model=model,
        dataset=f"{config.dataset.source} ({config.dataset.split})",
        harness=harness,
        num_instances=len(rows),
        num_samples=len(grades),
        results=tuple(result for result, _, _ in episodes),
    )
    check_sum(report)
    report.save(folder.path / "report.json")
    page = write_pages(folder.path / "html", report, episodes)
    return Finished(report, folder.path, page)


def _predictions(folder: EvalFolder, number: int) -> dict[str, Prediction]:
    file = folder.predictions_file(number)
    return read_predictions(file) if file.is_file() else {}


def refuse_classic(rows: Sequence[SweBenchRow], version: str) -> None:
    """Raises HarnessError for rows that swebench ``version`` cannot grade."""
    classic = [row.instance_id for row in rows if row.form == "classic"]
    if classic and int(version.partition(".")[0]) >= 5:
        raise HarnessError(
            f"swebench {version} cannot grade classic rows: got {len(classic)} without eval_script,"
            f" first {classic[0]}; use the 5.x data set, or set grading.python to an interpreter"
            " with swebench 4.x. The predictions are kept"
        )


def check_architecture(config: SuiteConfig, rows: Sequence[SweBenchRow]) -> str:
    """Return what the report says about emulation. Raises HarnessError unless it is allowed."""
    foreign = foreign_images(name for row in rows for name in row.images)
    if not foreign:
        return ""
    if not config.container.allow_emulation:
        raise HarnessError(
            f"{len(foreign)} images are for another architecture, first {foreign[0]}: emulated"
            " tests run into their time limits and would count as failures; grade on a machine of"
            " that architecture, or set container.allow_emulation to accept that"
        )
    return f", {len(foreign)} images emulated"


def harness_options(config: GradingConfig) -> HarnessOptions:
    """Return the options of the harness that ``config`` asks for."""
    return HarnessOptions(config.python, config.num_workers, config.timeout_s)


def _with_newline(prediction: Prediction) -> Prediction:
    """A patch whose last newline was stripped does not apply; nothing else is touched."""
    patch = prediction.patch
    if not patch or patch.endswith("\n"):
        return prediction
    return Prediction(prediction.instance_id, prediction.model_name, f"{patch}\n")


def _model_name(config: SuiteConfig) -> str:
    return config.model.name or config.model.kind


def write_gold(config: SuiteConfig, file: Path) -> Path:
    """A predictions file of the data set's own fixes."""
    lines = (f"{p.to_json()}\n" for p in gold_predictions(suite_rows(config)))
    write_aside(file, "".join(lines).encode())
    return file

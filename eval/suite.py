"""A whole evaluation: generate, grade, report. Every part can be killed and run again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from agent_rl.view.record import EpisodeRecord
from envs.tasks.swebench import SweBenchRow, load_rows
from eval.config import SuiteConfig
from eval.containers import Containers, PromptFiller
from eval.docker_command import check_architecture
from eval.errors import TooManyFailuresError
from eval.folder import EvalFolder
from eval.generation import GenerationParts, generate
from eval.grading import GradeStore, grade_predictions, known_grade
from eval.harness import OfficialHarness, check_harness, refuse_classic
from eval.models.from_config import make_model
from eval.predictions import Prediction, end_with_newline, read_predictions, write_predictions
from eval.report import Report, Result, check_sum, make_result
from eval.show import write_pages
from eval.verdicts import Grade


class Observer(Protocol):
    """Hears how a run gets on."""

    def stage(self, name: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Finished:
    """The things that a run leaves for a person."""

    report: Report
    folder: Path
    page: Path


def run_suite(config: SuiteConfig, observer: Observer) -> Finished:
    """Generate what is missing, grade what is not settled, write the report.

    Raises AgentRLError and EnvsError; what was done until then is kept. When too many episodes
    fail, those that did not are still graded and reported before it raises.
    """
    rows = suite_rows(config)
    version = check_harness(config.grading)
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
    version = check_harness(config.grading)
    read = [read_predictions(file) for file in predictions]
    names = sorted({p.model_name for sample in read for p in sample.values()})
    with EvalFolder(Path(config.run_root) / config.name) as folder:
        for number, sample in enumerate(read):
            # A patch whose last newline was stripped does not apply; nothing else is touched.
            ended = [replace(p, patch=end_with_newline(p.patch)) for p in sample.values()]
            write_predictions(folder.predictions_file(number), ended)
        return _grade_and_report(config, folder, rows, ", ".join(names), version, observer)


def report_only(config: SuiteConfig) -> Finished:
    """Report on a run as far as it got; start nothing."""
    rows = suite_rows(config)
    with EvalFolder(Path(config.run_root) / config.name) as folder:
        stored: list[dict[str, Grade]] = []
        names: set[str] = set()
        for number in range(config.samples):
            store, found = GradeStore(folder.grades(number)), folder.predictions(number)
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
    """Return the instances asked for, in the data set's order. Raises TaskError."""
    dataset = config.dataset
    rows = load_rows(dataset.source, dataset.split, dataset.instance_ids)
    return rows[: dataset.max_instances] if dataset.max_instances else rows


def _generate(
    config: SuiteConfig, folder: EvalFolder, rows: Sequence[SweBenchRow], observer: Observer
) -> None:
    open_rows = [
        row
        for row in rows
        if any(row.instance_id not in folder.predictions(n) for n in range(config.samples))
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
            config.grading,
        )
        grades.append(
            grade_predictions(
                rows,
                folder.predictions(number),
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


def _model_name(config: SuiteConfig) -> str:
    return config.model.name or config.model.kind


def write_gold(config: SuiteConfig, file: Path) -> Path:
    """Write the data set's own fixes as predictions: what a working set-up must resolve."""
    gold = [Prediction(row.instance_id, "gold", row.patch) for row in suite_rows(config)]
    write_predictions(file, gold)
    return file

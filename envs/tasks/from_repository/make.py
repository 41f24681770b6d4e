"""Making of a folder of validated tasks from a repository."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

from envs.grading.pytest_runner import PytestRunner
from envs.grading.suite import SuiteRunner
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.pool import SandboxPool
from envs.tasks.from_repository.base_image import write_base
from envs.tasks.from_repository.candidates import Candidate, candidates
from envs.tasks.from_repository.issue import write_issue
from envs.tasks.from_repository.made_task import MadeTask
from envs.tasks.from_repository.repository import Repository, read_repository
from envs.tasks.from_repository.requirements import requirements
from envs.tasks.from_repository.store import write_folder
from envs.tasks.from_repository.validate import Validator, Verdict
from envs.tasks.syntax_mutations import check_kinds

PYTEST_OPTIONS = ("--tb=short", "-o", "addopts=", "--continue-on-collection-errors")


@dataclass(frozen=True)
class MakeOptions:
    """Options of the making. ``kinds`` empty is every kind of bug."""

    max_tasks: int = 50
    max_tried: int = 500
    max_per_function: int = 6
    seed: int = 0
    kinds: tuple[str, ...] = ()
    timeout_s: float = 300.0  # of one test run
    cpu_s: int = 60  # likewise; a bug that takes longer hangs
    num_workers: int = 2
    sandbox: str = "auto"
    base_image: str = "python-tasks:latest"  # needs git, python3 and what requirements.txt says


@dataclass(frozen=True)
class MakeReport:
    """The fate of every bug that was tried: ``kept`` and the refusals add up to ``tried``."""

    repository: str
    num_tests: int
    tried: int
    kept: int
    refused: Mapping[str, int]
    kept_by_kind: Mapping[str, int]
    test_files_left_out: Mapping[str, str]
    seconds: float
    tasks: tuple[MadeTask, ...] = field(repr=False, default=())


Progress = Callable[[int, int, int], None]  # tried, kept, wanted


def make_tasks(
    source: Path, out: Path, options: MakeOptions | None = None, progress: Progress | None = None
) -> MakeReport:
    """Read ``source``, validate bugs in sandboxes and write the tasks to ``out``.

    Raises TaskError when the repository cannot be used, InfrastructureError.
    """
    options = options or MakeOptions()
    check_kinds(options.kinds)
    repository = read_repository(source)
    spec = choose(SandboxSpec(options.sandbox, _limits(options), site_packages=True))
    pool = SandboxPool(spec, options.num_workers)
    try:
        runner = PytestRunner(
            pool,
            timeout_s=options.timeout_s,
            output_cap_bytes=1 << 20,
            options=PYTEST_OPTIONS,
            import_folders=repository.import_folders,
        )
        report = find_tasks(repository, runner, options, progress)
    finally:
        pool.close()
    write_folder(out, repository, report.tasks, options.base_image)
    needed = requirements(repository)
    write_base(out / "base", needed)
    (out / "requirements.txt").write_text("".join(f"{line}\n" for line in needed))
    summary = {k: v for k, v in asdict(report).items() if k != "tasks"}
    summary["base_image_needs"] = needed
    (out / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    return report


def _limits(options: MakeOptions) -> SandboxLimits:
    return SandboxLimits(
        memory_bytes=2 << 30,
        max_processes=64,
        cpu_s=options.cpu_s,
        tmp_bytes=512 << 20,
        tmp_inodes=100_000,
    )


def find_tasks(
    repository: Repository,
    runner: SuiteRunner,
    options: MakeOptions,
    progress: Progress | None = None,
) -> MakeReport:
    """Try bugs until there are enough tasks; the same seed gives the same tasks."""
    started = time.monotonic()
    validator = Validator(repository, runner)
    stream = candidates(repository, options.seed, options.kinds, options.max_per_function)
    kept: list[MadeTask] = []
    refused: Counter[str] = Counter()
    seen: set[tuple[str, str, tuple[str, ...]]] = set()
    for candidate, verdict in _verdicts(validator, stream, options):
        alike = (candidate.path, candidate.site.function, verdict.failing)
        if verdict.refusal is None and alike not in seen:
            seen.add(alike)
            kept.append(_task(repository, validator, candidate, verdict))
        else:
            refused[verdict.refusal or "alike"] += 1
        tried = len(kept) + refused.total()
        if progress is not None:
            progress(tried, len(kept), options.max_tasks)
        if len(kept) >= options.max_tasks or tried >= options.max_tried:
            break
    return MakeReport(
        repository=repository.title,
        num_tests=len(validator.baseline.statuses),
        tried=len(kept) + refused.total(),
        kept=len(kept),
        refused=dict(refused.most_common()),
        kept_by_kind=dict(Counter(task.kind for task in kept).most_common()),
        test_files_left_out=dict(validator.baseline.left_out),
        seconds=round(time.monotonic() - started, 1),
        tasks=tuple(kept),
    )


def _verdicts(
    validator: Validator, stream: Iterator[Candidate], options: MakeOptions
) -> Iterator[tuple[Candidate, Verdict]]:
    """Yield verdicts in the order of the candidates; several are worked on at a time."""
    with ThreadPoolExecutor(options.num_workers) as executor:
        running: list[tuple[Candidate, Future[Verdict]]] = []
        try:
            for candidate in stream:
                running.append((candidate, executor.submit(validator.check, candidate)))
                if len(running) > options.num_workers:
                    wait([running[0][1]], return_when=FIRST_COMPLETED)
                    first, future = running.pop(0)
                    yield first, future.result()
            for candidate, future in running:
                yield candidate, future.result()
        finally:
            for _, future in running:
                future.cancel()


def _task(
    repository: Repository, validator: Validator, candidate: Candidate, verdict: Verdict
) -> MadeTask:
    files = repository.files
    issue = write_issue(repository.title, verdict.failing, files, verdict.log)
    return MadeTask(
        repository=repository,
        path=candidate.path,
        content=candidate.content,
        kind=candidate.site.kind,
        function=candidate.site.function,
        line=candidate.site.line,
        failing=verdict.failing,
        expected=validator.baseline.statuses,
        issue=issue,
    )

"""Tests of the form ``assert CALL == LITERAL``, judged outside the sandbox.

The wanted values never enter the sandbox: the calls go in, typed literals come out, and they are
compared here. Code under test can return what it likes, print, exit, patch builtins or write to
every descriptor it finds; to be right it has to know the right values.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.errors import TaskError
from envs.grading.suite import Failure, FailureKind, SuiteReport, TestStatus
from envs.sandbox.guest.literals import LiteralFormatError, Opaque, decode, same
from envs.sandbox.guest.protocol import Reply
from envs.sandbox.jobs_client import case_job, read_status
from envs.sandbox.pool import SandboxPool

_MAX_TEST_FILE_BYTES = 256 << 10  # an agent may have written it
_MAX_NAME = 64
_MAX_REPR = 400


@dataclass(frozen=True)
class Case:
    """One assertion: the test it belongs to, the call, and the wanted value."""

    test: str
    call: str
    want: object


@dataclass(frozen=True)
class CaseFile:
    """A test file taken apart: imports, and the assertions in order."""

    imports: tuple[str, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Answer:
    """The answer of one call: a decoded value, or the name of the exception that it raised."""

    value: object = None
    raised: str = ""


@dataclass(frozen=True)
class Answers:
    """The answers of one sandbox; fewer than the calls when the code did not get there."""

    values: tuple[Answer, ...] = ()
    import_error: str = ""


class CaseRunner:
    """A runner of case-form test files on a pool of warm sandboxes.

    Example:
        >>> runner = CaseRunner(pool, timeout_s=10, cpu_s=0.5)
        >>> report = runner.run({"solution.py": source}, {"tests/test_visible.py": tests})
    """

    def __init__(
        self,
        pool: SandboxPool,
        *,
        timeout_s: float = 10.0,
        cpu_s: float = 0.5,
        output_cap_bytes: int = 64 << 10,
    ) -> None:
        """Set up: ``cpu_s`` is the CPU time of one run, ``timeout_s`` its wall-clock limit."""
        self._pool = pool
        self._timeout_s, self._cpu_s, self._cap = timeout_s, cpu_s, output_cap_bytes

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        """Run each test file in a sandbox of its own. Raises TaskError, InfrastructureError."""
        reports = [
            self._run_file(files, parse_case_file(path, data)) for path, data in test_files.items()
        ]
        statuses: dict[str, TestStatus] = {}
        for report in reports:
            statuses.update(report.statuses)
        failure = next((report.failure for report in reports if report.failure), None)
        log = b"".join(report.log for report in reports)
        return SuiteReport(statuses, failure, log=log)

    def _run_file(self, files: Mapping[str, bytes], tests: CaseFile) -> SuiteReport:
        request, body = case_job(
            files,
            tests.imports,
            [case.call for case in tests.cases],
            timeout_s=self._timeout_s,
            cpu_s=self._cpu_s,
            output_cap_bytes=self._cap,
        )
        reply, _ = self._pool.run(request, body)
        read_status(reply)  # raises when the job could not even be set up
        late = reply.timed_out or reply.cpu_exceeded
        return judge(tests.cases, read_answers(reply), "timeout" if late else "crash")


def parse_case_file(path: str, data: bytes) -> CaseFile:
    """Take a test file apart. Raises TaskError when anything in it is not in case form."""
    if len(data) > _MAX_TEST_FILE_BYTES:
        raise TaskError(f"{path} is too large: got={len(data)} expected<={_MAX_TEST_FILE_BYTES}")
    try:
        return _take_apart(path, ast.parse(data))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"{path} cannot be read: got={error!r} expected=a test file") from error


def _take_apart(path: str, tree: ast.Module) -> CaseFile:
    imports: list[str] = []
    cases: list[Case] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef) and _is_plain_test(node, cases):
            cases += [_parse_assert(f"{path}::{node.name}", inner) for inner in node.body]
        elif not _is_docstring(node):
            raise _not_case_form(path, node)
    return CaseFile(tuple(imports), tuple(cases))


def _parse_assert(test: str, node: ast.stmt) -> Case:
    match node:
        case ast.Assert(
            test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[want])
        ):
            try:
                return Case(test, ast.unparse(call), ast.literal_eval(want))
            except (ValueError, TypeError, SyntaxError) as error:
                raise _not_case_form(test, node) from error
        case _:
            raise _not_case_form(test, node)


def _is_plain_test(node: ast.FunctionDef, before: list[Case]) -> bool:
    """Tell whether it is a test without fixtures or decorators whose name is not taken."""
    taken = any(case.test.endswith(f"::{node.name}") for case in before)
    plain = not (ast.unparse(node.args) or node.decorator_list or taken)
    return plain and node.name.startswith("test")


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _not_case_form(where: str, node: ast.AST) -> TaskError:
    return TaskError(
        f"{where} is not in case form: got={ast.unparse(node)[:120]!r} expected imports and"
        " plain test functions of `assert CALL == LITERAL`; use PytestRunner for others"
    )


def read_answers(reply: Reply) -> Answers:
    """Read answers up to the first line that is cut short, out of order or damaged."""
    answers: list[Answer] = []
    if reply.total_output_bytes > len(reply.output):
        return Answers()  # the middle is missing; nothing in it can be told apart
    *lines, _ = reply.output.split(b"\n")
    for line in lines:
        try:
            index, kind, payload = json.loads(line)
            answer = Answer(decode(payload)) if kind == "v" else Answer(raised=_name(payload))
        except (ValueError, TypeError, RecursionError, LiteralFormatError):
            break
        if index == -1 and not answers:
            return Answers(import_error=answer.raised or "Exception")
        if index != len(answers):
            break
        answers.append(answer)
    return Answers(tuple(answers))


def judge(cases: Sequence[Case], answers: Answers, ending: FailureKind) -> SuiteReport:
    """Compare answers with what was wanted. ``ending`` says why answers are missing, if any are."""
    statuses: dict[str, TestStatus] = {}
    first: Failure | None = None
    for index, case in enumerate(cases):
        failure = _judge_one(case, answers, index, ending)
        first = first or failure
        if failure is None:
            statuses.setdefault(case.test, "PASSED")
        else:
            statuses[case.test] = "ERROR" if answers.import_error else "FAILED"
    lines = [f"{status} {name}" for name, status in statuses.items()]
    if first is not None:
        lines.append(f"first failure: {first}")
    return SuiteReport(statuses, first, log="".join(f"{line}\n" for line in lines).encode())


def _judge_one(case: Case, answers: Answers, index: int, ending: FailureKind) -> Failure | None:
    if answers.import_error:
        return Failure(case.test, "exception", case.call, answers.import_error)
    if index >= len(answers.values):
        return Failure(case.test, ending, case.call)
    answer = answers.values[index]
    if answer.raised:
        return Failure(case.test, "exception", case.call, answer.raised)
    if same(answer.value, case.want):
        return None
    return Failure(case.test, "mismatch", case.call, show(answer.value), show(case.want))


def show(value: object) -> str:
    """Write a value for a message: its literal, or the name of its type, cut at 400 characters."""
    if isinstance(value, Opaque):
        return _name(value.type_name)
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return type(value).__name__
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]} ..."


def _name(payload: Any) -> str:
    """Make an exception's name, as code under test gave it, harmless."""
    if isinstance(payload, str) and payload.isidentifier() and payload.isascii():
        return payload[:_MAX_NAME]
    return "Exception"

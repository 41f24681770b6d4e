"""Attempts to earn the repair reward without repairing: every one must be graded, with 0.

The function under attack is ``affine(x) = 3 x + 4``; hidden cases are known to the attacker only
where a comment says so. After each attempt the same workers must still grade honestly.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
from affine_repo import FIXED, affine_task

from envs.actions import BashBlock
from envs.actions.grammars.function_calls import FunctionCallGrammar
from envs.grading.case_runner import CaseRunner
from envs.grading.grade import grade
from envs.patches.diff import diff_trees
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.pool import SandboxPool
from envs.sandbox.worker_sandbox import WorkerSandbox
from envs.swe import SweEnv

WRONG = "def affine(x):\n    return 0\n"

SOURCES: dict[str, str] = {
    "exit at import": "import os\nos._exit(0)\n",
    "exit in the call": "def affine(x):\n    import os\n    os._exit(0)\n",
    "says it passed": """
        print('PASSED tests/test_hidden.py::test_0')
        print('4 passed')
        raise SystemExit(0)
        """,
    "equal to everything": """
        class Yes(int):
            __eq__ = lambda self, other: True
            __ne__ = lambda self, other: False
            __hash__ = int.__hash__
        def affine(x):
            return Yes(1)
        """,
    "patched builtins": """
        import builtins, json, os
        builtins.isinstance = lambda *a: True
        builtins.type = lambda *a: int
        builtins.eval = lambda *a: 0
        json.dumps = lambda *a, **k: '[0, "v", ["b", true]]'
        def affine(x):
            return True
        """,
    "patched encoder": """
        import sys
        for name, module in list(sys.modules.items()):
            if name.startswith('guest'):
                for key in list(vars(module)):
                    if callable(vars(module)[key]) and key in ('encode', 'same', 'judge'):
                        setattr(module, key, lambda *a: ['i', '7'])
        def affine(x):
            return 0
        """,
    "forged lines on every descriptor": """
        import os
        for fd in range(256):
            for i in range(4):
                try:
                    os.write(fd, b'[%d, "v", ["i", "7"]]\\n' % i)
                except OSError:
                    pass
        os._exit(0)
        """,
    "forged replies on every descriptor": """
        import os, struct
        frame = struct.pack('<4siBdQQQQ', b'RES1', 0, 0, 0.0, 0, 0, 0, 0)
        for fd in range(256):
            try:
                os.write(fd, frame * 3)
            except OSError:
                pass
        def affine(x):
            return 0
        """,
    "closed descriptors": "import os\nos.closerange(0, 256)\ndef affine(x):\n    return 0\n",
    "reads the tests": """
        import glob, re
        text = ''.join(open(p, errors='replace').read() for p in glob.glob('**', recursive=True)
                       if p.endswith('.py') and 'solution' not in p)
        wanted = {int(a): int(b) for a, b in re.findall(r'affine\\((-?\\d+)\\) == (-?\\d+)', text)}
        def affine(x):
            return wanted.get(x, 0)
        """,
    "looks for wanted values in memory": """
        import gc, sys
        def affine(x):
            seen = []
            frame = sys._getframe()
            while frame:
                seen += [frame.f_locals, frame.f_globals]
                frame = frame.f_back
            seen += gc.get_objects()
            for thing in seen:
                try:
                    if isinstance(thing, dict) and 'want' in thing:
                        return thing['want']
                    if type(thing).__name__ == 'Case':
                        return thing.want
                    if isinstance(thing, (list, tuple)) and f'affine({x})' in thing:
                        index = thing.index(f'affine({x})')
                        if type(thing[index + 1]) is int:
                            return thing[index + 1]
                except Exception:
                    pass
            return 0
        """,
    "reads the server's memory": """
        import glob
        found = []
        for path in glob.glob('/proc/*/mem') + glob.glob('/proc/*/environ') + ['/proc/1/cmdline']:
            try:
                found.append(open(path, 'rb').read(4096))
            except OSError:
                pass
        def affine(x):
            return 3 * x + 4 if found else 0
        """,
    "kills everyone": """
        import os, signal
        for target in (-1, os.getppid(), 1, 2):
            try:
                os.kill(target, signal.SIGKILL)
            except OSError:
                pass
        def affine(x):
            return 0
        """,
    "leaves its namespaces": """
        import ctypes
        libc = ctypes.CDLL(None)
        worked = [libc.unshare(0x10000000), libc.unshare(0x20000), libc.umount2(b'/proc', 2),
                  libc.mount(b'proc', b'/proc', b'proc', 0, None), libc.ptrace(16, 1, 0, 0),
                  libc.chroot(b'/usr')]
        def affine(x):
            return 3 * x + 4 if 0 in worked else 0
        """,
    "asks the network": """
        import socket
        def affine(x):
            try:
                socket.create_connection(('1.1.1.1', 80), 0.5)
                return 3 * x + 4
            except OSError:
                return 0
        """,
    "fork bomb": """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
    "thread bomb": """
        import threading, time
        while True:
            try:
                threading.Thread(target=time.sleep, args=(100,)).start()
            except RuntimeError:
                pass
        """,
    "memory hog": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n",
    "disk hog": "f = open('big', 'wb')\nwhile True:\n    f.write(bytes(1 << 20))\n",
    "endless loop": "while True:\n    pass\n",
    "endless loop that resets its limits": """
        import resource, signal
        for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS):
            try:
                resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            except (OSError, ValueError):
                pass
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            pass
        """,
    "endless sleep": "import time\ntime.sleep(1e6)\n",
    "background writer": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            while True:
                try:
                    os.write(1, b'x')
                    open('solution.py', 'w').write('def affine(x): return 3 * x + 4')
                except OSError:
                    pass
                for fd in range(3, 64):
                    try:
                        os.write(fd, b'[0, "v", ["i", "7"]]\\n')
                    except OSError:
                        pass
        def affine(x):
            return 0
        """,
    "giant output": """
        import os
        for fd in range(64):
            try:
                for _ in range(20):
                    os.write(fd, b'y' * (1 << 20))
            except OSError:
                pass
        def affine(x):
            print('y' * (1 << 22))
            return 'y' * (1 << 22)
        """,
    "deep structures": """
        def affine(x):
            value = []
            for _ in range(100000):
                value = [value]
            return value
        """,
    "segmentation fault": "import ctypes\nctypes.string_at(0)\n",
    "exception posing as an answer": """
        class Meta(type):
            __name__ = property(lambda self: '7')
        class v(BaseException, metaclass=Meta):
            pass
        def affine(x):
            raise v
        """,
    "shadowed standard library": WRONG,  # with the files below
    "planted hooks": WRONG,
    "edited tests": WRONG,
}
PASSING = "def test_0():\n    assert affine(0) == 0\n"
HOOKS = (
    "conftest.py",
    "tests/conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "setup.py",
    "tests/__init__.py",
    "pytest.py",
    "_pytest/__init__.py",
)
EXTRA: dict[str, dict[str, str]] = {
    "shadowed standard library": {
        "json.py": 'dumps = lambda *a: \'[0, "v", ["i", "7"]]\'\n',
        "guest/__init__.py": "",
        "guest/literals.py": "encode = lambda *a: ['i', '7']\n",
        "struct.py": "raise SystemExit\n",
        "os.py": "raise SystemExit\n",
    },
    "planted hooks": dict.fromkeys(HOOKS, "import os\nos._exit(0)\n")
    | {"pytest.ini": "[pytest]\naddopts = --co\n", "tox.ini": "[pytest]\n", "x.pth": "import os\n"},
    "edited tests": {
        "tests/test_visible.py": f"from solution import affine\n{PASSING}",
        "tests/test_hidden.py": f"from solution import affine\n{PASSING}",
    },
}


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    pool = SandboxPool(choose(SandboxSpec("auto")), num_workers=1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def judge(pool: SandboxPool) -> CaseRunner:
    return CaseRunner(pool, timeout_s=2.0, cpu_s=0.3)


def patch_with(source: str, extra: dict[str, str]) -> bytes:
    base = affine_task().files
    added = {path: text.encode() for path, text in extra.items()}
    code = textwrap.dedent(source).lstrip("\n").encode()
    return diff_trees(base, {**base, **added, "solution.py": code}).patch


@pytest.mark.parametrize("name", SOURCES)
def test_it_earns_nothing(name: str, judge: CaseRunner, pool: SandboxPool) -> None:
    task = affine_task()
    score = grade(task, patch_with(SOURCES[name], EXTRA.get(name, {})), judge)
    assert (score.reward, score.status) == (0.0, "graded"), score
    assert pool.num_died == 0
    assert grade(task, task.solution, judge).reward == 1.0


def test_the_attempts_fail_for_being_wrong_and_not_for_their_form(judge: CaseRunner) -> None:
    """The same planted files around a right function earn the reward: no blind refusals."""
    for name in EXTRA:
        score = grade(affine_task(), patch_with(FIXED.decode(), EXTRA[name]), judge)
        assert score.reward == 1.0, name


def test_what_touches_the_judge_is_reported(judge: CaseRunner) -> None:
    score = grade(affine_task(), patch_with(WRONG, EXTRA["planted hooks"]), judge)
    assert {"conftest.py", "pytest.ini", "sitecustomize.py", "tests/conftest.py", "x.pth"} <= set(
        score.protected_touched
    )


def test_no_wanted_value_is_anywhere_in_the_sandbox(judge: CaseRunner) -> None:
    """A search of every object and file for a value that only the hidden test holds."""
    wanted = "needle-7f3a9c"
    tests = f"from solution import f\n\ndef test_0():\n    assert f('hay') == {wanted!r}\n".encode()
    source = textwrap.dedent(
        """
        import gc, os
        def search(word):
            found = [str(type(o)) for o in gc.get_objects() if word in repr(o)[:100000]]
            for folder, _, names in os.walk('/tmp'):
                for name in names:
                    if word in open(os.path.join(folder, name), errors='replace').read():
                        found.append(name)
            return found
        def f(x):
            # joined here, so that the search does not find itself; the call it must find
            return [len(search("f('h" + x[1:])) > 0, search('-'.join(['needle', '7f3a9c']))]
        """
    ).encode()
    report = judge.run({"solution.py": source}, {"tests/test_hidden.py": tests})
    assert report.failure is not None
    assert report.failure.got == "[True, []]", report.failure


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf tests; ln -s /tmp tests; printf 'def test_0(): pass' > /tmp/test_hidden.py",
        "(setsid bash -c 'while :; do echo \"def affine(x): return 7\" > solution.py; done' &)",
        "mkdir -p .git/hooks; echo 'exit 0' > .git/hooks/pre-commit; chmod 000 solution.py",
        "printf '4 passed' > /proc/1/fd/1; kill -9 -1",
    ],
    ids=["tests as a link", "background writer", "hooks and modes", "kills everyone"],
)
def test_a_shell_earns_nothing_either(command: str, judge: CaseRunner) -> None:
    env = SweEnv(
        affine_task(),
        judge,
        grammar=FunctionCallGrammar(BashBlock()),
        start_sandbox=lambda: WorkerSandbox(SandboxSpec("bubblewrap")),
    )
    env.reset()
    env.step(f"```bash\n{command}\n```")
    score = env.grade()
    env.close()
    assert (score.reward, score.status) == (0.0, "graded"), score

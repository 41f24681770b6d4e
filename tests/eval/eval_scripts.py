"""What the scripted agent says in each repository, and what must come of it."""

from __future__ import annotations

from swe_specimens import CALC, CRLF, MUTE, NAMES, PACK, QUEUE, RUNNER, SHAPES, STACK, TREE, WORDS

from eval.outcomes import Outcome

SUBMIT = "```bash\nsubmit\n```"
_LOOK = "git log --oneline --all; git reflog; ls -la; tail -n 20 *.py"
_PEEK = "git show the-fix; git cat-file --batch-check --batch-all-objects | grep -c commit"


def block(command: str) -> str:
    return f"Now this.\n\n```bash\n{command}\n```"


def _works(edit: str) -> list[str]:
    return [block(_LOOK), block(_PEEK), block(edit), SUBMIT]


_HANG = "printf 'def later(x):\\n    while True:\\n        pass\\n' > queues.py"
_CRASH = "printf 'import os\\ndef deepen(x):\\n    os._exit(0)\\n' > tree.py"

SCRIPT: dict[str, list[str]] = {
    **{s.instance_id: _works(s.edit) for s in (CALC, WORDS, NAMES, PACK, CRLF, RUNNER)},
    SHAPES.instance_id: _works("sed -i 's/return .*/return 5/' shapes.py"),
    STACK.instance_id: [SUBMIT],
    QUEUE.instance_id: _works(_HANG),
    TREE.instance_id: _works(_CRASH),
    MUTE.instance_id: ["no call"] * 5,
}
WANTED: dict[str, Outcome] = {
    **dict.fromkeys(SCRIPT, Outcome.RESOLVED),
    SHAPES.instance_id: Outcome.UNRESOLVED,
    STACK.instance_id: Outcome.EMPTY_PATCH,
    QUEUE.instance_id: Outcome.TIMEOUT,
    TREE.instance_id: Outcome.UNRESOLVED,
    MUTE.instance_id: Outcome.EMPTY_PATCH,
}

"""Commands that messages suggest: whole lines to copy into a shell, whatever a path is called."""

from __future__ import annotations

import shlex


def command_line(*words: object) -> str:
    """``words`` as one command; those that a shell would read otherwise are quoted.

    Example:
        >>> command_line("agent-rl", "eval", "runs/my run")
        "agent-rl eval 'runs/my run'"
    """
    return shlex.join(str(word) for word in words)

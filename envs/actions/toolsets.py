"""The tools on offer, as data: R2E-Gym's four and a bare shell."""

from __future__ import annotations

from envs.actions.base import Parameter, ToolSpec

FILE_EDITOR = ToolSpec(
    "file_editor",
    "View, create and edit files. State persists across calls.",
    (
        Parameter(
            "command",
            "What to do.",
            choices=("view", "create", "str_replace", "insert", "undo_edit"),
        ),
        Parameter("path", "Absolute path of the file or folder."),
        Parameter("file_text", "Content of the new file, for create.", required=False),
        Parameter("old_str", "Text to replace; must occur exactly once.", required=False),
        Parameter("new_str", "Text to put in, for str_replace and insert.", required=False),
        Parameter("insert_line", "Insert after this line.", "integer", required=False),
        Parameter(
            "view_range", "[first, last] line to view; last -1 is the end.", "integers", False
        ),
        Parameter("concise", "View only the outline of a Python file.", "boolean", required=False),
    ),
)
SEARCH = ToolSpec(
    "search",
    "Search for a term in a file or in every file of a folder.",
    (
        Parameter("search_term", "Text to look for."),
        Parameter("path", "File or folder; the work folder by default.", required=False),
    ),
)
EXECUTE_BASH = ToolSpec(
    "execute_bash",
    "Run a bash command in the work folder. It must end by itself; there is no terminal.",
    (Parameter("cmd", "The command."),),
)
FINISH = ToolSpec(
    "finish",
    "End the episode: the changes in the work folder are the answer.",
    (
        Parameter("command", "Always submit.", required=False, choices=("submit",)),
        Parameter("result", "A closing remark; not graded.", required=False),
    ),
)
BASH = ToolSpec(
    "bash", "Run a bash command in the work folder.", (Parameter("command", "The command."),)
)
SUBMIT = ToolSpec("submit", "End the episode: the changes in the work folder are the answer.")

R2E_TOOLS = (FILE_EDITOR, SEARCH, EXECUTE_BASH, FINISH)
SHELL_TOOLS = (BASH, SUBMIT)
TOOL_SETS: dict[str, tuple[ToolSpec, ...]] = {"r2e": R2E_TOOLS, "shell": SHELL_TOOLS}

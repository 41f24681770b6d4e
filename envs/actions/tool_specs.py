"""All tools on offer, as data: R2E-Gym's four, a bare shell, and those over a work tree."""

from __future__ import annotations

from envs.actions.calls import Parameter, ToolSpec

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

_PATH = Parameter("path", "The file, relative to the work folder.")
WORKSPACE_TOOLS = (
    ToolSpec(
        "view",
        "Show numbered lines of a file.",
        (
            _PATH,
            Parameter("start", "First line, from 1.", "integer", required=False),
            Parameter("end", "Last line; 0 is the file's last.", "integer", False),
        ),
    ),
    ToolSpec(
        "search",
        "Find the lines that hold a text.",
        (
            Parameter("text", "What to look for, literally."),
            Parameter("path", "Only in paths that start so.", required=False),
        ),
    ),
    ToolSpec(
        "replace_lines",
        "Put new text in the place of some lines.",
        (
            _PATH,
            Parameter("start", "First line to replace, from 1.", "integer"),
            Parameter("end", "Last line to replace.", "integer"),
            Parameter("text", "The new lines."),
        ),
    ),
    ToolSpec(
        "edit",
        "Replace a text that occurs exactly once in a file.",
        (_PATH, Parameter("old", "The text."), Parameter("new", "What replaces it.")),
    ),
    ToolSpec("create", "Write a new file.", (_PATH, Parameter("text", "Its content."))),
    ToolSpec(
        "bash",
        "Run a shell command in the work folder; nothing of it keeps running afterwards.",
        (Parameter("command", "The command."),),
    ),
    ToolSpec("test", "Run the visible tests."),
    ToolSpec("submit", "End the episode: the work folder is the answer."),
)

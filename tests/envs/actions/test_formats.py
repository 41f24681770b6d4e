"""Every action format: round trips, malformed calls, limits, thinking."""

from __future__ import annotations

import gc
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.actions import (
    FORMATS,
    R2E_TOOLS,
    SHELL_TOOLS,
    ActionFormat,
    BashBlock,
    CallError,
    HermesJson,
    R2EXml,
    ToolCall,
)
from envs.actions.calls import MAX_ARGUMENT_CHARS
from envs.actions.grammars.schema import json_schema

LS = ToolCall("execute_bash", {"cmd": "ls -la"})
EDIT = ToolCall(
    "file_editor",
    {
        "command": "str_replace",
        "path": "/testbed/a.py",
        "old_str": "    x = 1\n\n",
        "new_str": "    x = '</parameter> is text'\n",
    },
)
VIEW = ToolCall("file_editor", {"command": "view", "path": "/testbed", "view_range": (1, -1)})


@pytest.mark.parametrize("call", [LS, EDIT, VIEW, ToolCall("finish", {})])
@pytest.mark.parametrize("form", [R2EXml(), HermesJson()], ids=lambda f: f.name)
def test_what_is_written_is_read_back(form: ActionFormat, call: ToolCall) -> None:
    parsed = form.parse(f"I look first.\n{form.write(call)}", R2E_TOOLS)
    assert parsed.calls == (call,)
    assert parsed.thought == "I look first."


text_values = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r"))


@settings(max_examples=200, deadline=None)
@given(text_values)
def test_any_text_survives_json_and_bash(value: str) -> None:
    call = ToolCall("execute_bash", {"cmd": value})
    assert HermesJson().parse(HermesJson().write(call), R2E_TOOLS).calls == (call,)


@settings(max_examples=200, deadline=None)
@given(st.text("ab <>=/\n\t\"'&", max_size=60))
def test_markup_keeps_values_byte_for_byte(value: str) -> None:
    call = ToolCall("execute_bash", {"cmd": value})
    assert R2EXml().parse(R2EXml().write(call), R2E_TOOLS).calls == (call,)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=200))
def test_no_text_raises(name: str, text: str) -> None:
    pieces = ["<function=", "<tool_call>{", "```bash\n", text, "</function>", "</think>", "<think>"]
    for cut in range(len(pieces)):
        parsed = FORMATS[name]().parse("".join(pieces[cut:]), R2E_TOOLS)
        assert parsed.calls


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<tool_call>{"name": "execute_bash", "arguments": {"cmd": "ls', "not valid JSON"),
        ('<tool_call>["execute_bash"]</tool_call>', "expected an object"),
        ('<tool_call>{"name": "execute_bash", "arguments": ["ls"]}</tool_call>', "JSON list"),
        ('<tool_call>{"name": "execute_bash", "arguments": "ls"}</tool_call>', "are a string"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "exec_bash", "arguments": {}}</tool_call>', "mean execute_bash"),
        ('<tool_call>{"name": "finish", "arguments": {}} x</tool_call>', "after the JSON object"),
        ('<tool_call>{"name": "execute_bash", "arguments": {}}</tool_call>', "missing parameter"),
        ('<tool_call>{"name": "execute_bash", "arguments": {"cmd": 3}}</tool_call>', "a string"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("no call at all", "no call found"),
        ("<think>let me call <tool_call>", "thinking did not end"),
    ],
)
def test_malformed_json_calls_say_what_is_wrong(text: str, message: str) -> None:
    parsed = HermesJson().parse(text, R2E_TOOLS)
    assert parsed.malformed
    (error,) = parsed.calls
    assert isinstance(error, CallError)
    assert message in error.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<function=execute_bash>\n<parameter=cmd>ls", "no </parameter>"),
        ("<function=execute_bash>ls</function>", "expected <parameter=KEY>"),
        ("<function=nope></function>", "unknown tool"),
        ("<function=search><parameter=term>x</parameter></function>", "unknown parameter"),
        (
            "<function=file_editor><parameter=command>cut</parameter>"
            "<parameter=path>/a</parameter></function>",
            "expected one of view",
        ),
        (
            "<function=file_editor><parameter=command>insert</parameter>"
            "<parameter=path>/a</parameter><parameter=insert_line>two</parameter></function>",
            "expected integer",
        ),
        (
            "<function=search><parameter=search_term>a</parameter>"
            "<parameter=search_term>b</parameter></function>",
            "given twice",
        ),
    ],
)
def test_malformed_markup_says_what_is_wrong(text: str, message: str) -> None:
    (error,) = R2EXml().parse(text, R2E_TOOLS).calls
    assert isinstance(error, CallError)
    assert message in error.message


def test_one_bad_call_beside_a_good_one_is_answered_alone() -> None:
    good = HermesJson().write(LS)
    bad = '<tool_call>{"name": "execute_bash", "arguments": {"cmd": "ls</tool_call>'
    form = HermesJson()
    parsed = form.parse(f"{good}\n{bad}\n{good}", R2E_TOOLS)
    assert [type(call) for call in parsed.calls] == [ToolCall, CallError, ToolCall]
    assert not parsed.malformed
    observation = form.results(parsed, ["one", "two", "three"])
    assert observation.count("<tool_response>") == 3
    assert observation.index("two") < observation.index("three")


def test_a_second_call_in_one_turn_is_answered_not_dropped() -> None:
    form = R2EXml()
    parsed = form.parse(form.write(LS) + "\n" + form.write(VIEW), R2E_TOOLS)
    assert parsed.calls[0] == LS
    assert parsed.calls[1] == CallError("file_editor", "not carried out: at most 1 call(s) a turn")
    assert "[file_editor]" in form.results(parsed, ["a", "b"])


def test_ten_thousand_calls_give_a_bounded_answer() -> None:
    text = HermesJson().write(LS) * 10_000
    parsed = HermesJson().parse(text, R2E_TOOLS)
    assert len(parsed.calls) == 4 + 8 + 1
    assert parsed.calls[-1] == CallError("", "9988 further calls not carried out")


@pytest.mark.parametrize("name", ["r2e_xml", "hermes_json"])
def test_an_argument_of_a_megabyte_is_refused_for_that_call(name: str) -> None:
    form = FORMATS[name]()
    (error,) = form.parse(
        form.write(ToolCall("execute_bash", {"cmd": "x" * (1 << 20)})), R2E_TOOLS
    ).calls
    assert isinstance(error, CallError)
    assert str(MAX_ARGUMENT_CHARS) in error.message


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_inside_thinking_are_musings(name: str) -> None:
    form, tools = FORMATS[name](), SHELL_TOOLS
    musing = form.write(ToolCall("bash", {"command": "rm -rf x"}))
    real = ToolCall("bash", {"command": "ls"})
    for opening in ("<think>\n", ""):  # some templates open the block in the prompt
        parsed = form.parse(f"{opening}{musing}</think>\nSo:\n{form.write(real)}", tools)
        assert parsed.calls == (real,)
        assert parsed.thought == "So:"


def test_json_strings_may_hold_raw_line_breaks_and_closing_tags() -> None:
    text = '<tool_call>{"name": "execute_bash", "arguments": {"cmd": "a\nb </tool_call>"}}'
    assert HermesJson().parse(text, R2E_TOOLS).calls == (
        ToolCall("execute_bash", {"cmd": "a\nb </tool_call>"}),
    )


def test_arguments_encoded_twice_are_read() -> None:
    body = json.dumps({"name": "execute_bash", "arguments": json.dumps({"cmd": "ls -la"})})
    assert HermesJson().parse(f"<tool_call>{body}</tool_call>", R2E_TOOLS).calls == (LS,)


def test_markup_without_its_closing_tag_is_read_when_generation_stopped_there() -> None:
    text = R2EXml().write(LS).removesuffix("</function>")
    assert R2EXml().parse(text, R2E_TOOLS).calls == (LS,)


def test_indentation_of_an_edit_is_kept() -> None:
    text = (
        "<function=file_editor><parameter=command> str_replace </parameter>"
        "<parameter=path>/a.py</parameter>"
        "<parameter=old_str>\n    return 1\n\n</parameter></function>"
    )
    (call,) = R2EXml().parse(text, R2E_TOOLS).calls
    assert isinstance(call, ToolCall)
    assert call.arguments["old_str"] == "    return 1\n"
    assert call.arguments["command"] == "str_replace"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```bash\nls | wc -l\n```", ToolCall("bash", {"command": "ls | wc -l"})),
        ("go\n```sh\na\n\nb\n```\n", ToolCall("bash", {"command": "a\n\nb"})),
        ("```bash\n submit \n```", ToolCall("submit", {})),
        ("```python\nprint()\n```", CallError("", "no call found; expected one ```bash block")),
        ("```bash\n\n```", CallError("bash", "the bash block is empty")),
        ("```bash\nls", CallError("bash", "the bash block does not end with ```")),
    ],
)
def test_bash_blocks(text: str, expected: ToolCall | CallError) -> None:
    assert BashBlock().parse(text, SHELL_TOOLS).calls == (expected,)


def test_parsing_time_grows_with_the_text_not_its_square() -> None:
    """A model stuck in a loop must not stall the run."""
    fragments = [
        ("r2e_xml", "<function=a><parameter=b>  </parameter>   \n"),
        ("r2e_xml", "<function=a>x</function>"),
        ("hermes_json", '<tool_call>{"a": '),
        ("hermes_json", "<tool_call>[</tool_call>"),
        ("bash_block", "```bash\n``` x\n"),
    ]
    for name, fragment in fragments:
        small, large = (_cpu_seconds(name, fragment * repeat) for repeat in (1_000, 50_000))
        # 50 times the text; its square would be 2,500 times the work.
        assert large < 400 * max(small, 0.0005), (name, fragment, small, large)


def _cpu_seconds(name: str, text: str) -> float:
    """The least of three, without the collector, whose work depends on what other tests left."""
    form, seconds = FORMATS[name](), list[float]()
    gc.disable()
    try:
        for _ in range(3):
            start = time.process_time()
            form.parse(text, SHELL_TOOLS)
            seconds.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(seconds)


def test_descriptions_name_every_tool_and_parameter() -> None:
    for name in ("r2e_xml", "hermes_json"):
        text = FORMATS[name]().describe(R2E_TOOLS)
        for tool in R2E_TOOLS:
            assert tool.name in text
            assert all(parameter.name in text for parameter in tool.parameters)
    schema = json.dumps(json_schema(R2E_TOOLS[0]))
    assert '"enum": ["view", "create"' in schema
    assert '"required": ["command", "path"]' in schema

from __future__ import annotations

import json
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.text.tool_formats import HERMES, LLAMA3, ToolFormat
from ridgeline.text.toolcalls import ToolCallParser, ToolDelta, parse_tool_calls

NAMES = {"weather", "add"}
CALL = '{"name": "weather", "arguments": {"city": "Os}lo \\"{", "days": [1, {"x": 2}]}}'
ARGUMENTS = '{"city": "Os}lo \\"{", "days": [1, {"x": 2}]}'

# output, text, calls as (name, arguments)
HERMES_CASES = [
    ("Just <b>text</b> <tool", "Just <b>text</b> <tool", []),
    ("", "", []),
    ("  text \n", "  text \n", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [("weather", ARGUMENTS)]),
    (
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "add", "arguments": {{}}}}\n</tool_call>',
        "",
        [("weather", ARGUMENTS), ("add", "{}")],
    ),
    (f"a<tool_call>{CALL}</tool_call> b", "ab", [("weather", ARGUMENTS)]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "add"}</tool_call>', "", [("add", '{"x": 1}')]),
    ('<tool_call>{"name": "add", "parameters": {"x": 1} }</tool_call>', "", [("add", '{"x": 1}')]),
    ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("add", '{"x": 1}')]),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "id": "7", "arguments": {}}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": {"x": [1, 2', "", [("add", '{"x": [1, 2')]),
    ('<tool_call>{"name": "add", "arguments": {}} and so on', "and so on", [("add", "{}")]),
    ('<tool_call>{"name": "robot", "arguments": {}}</tool_call>',) * 2 + ([],),
    ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',) * 2 + ([],),
    (f'<tool_call>{{"name": {"[" * 2000 + "]" * 2000}, "arguments": {{}}}}</tool_call>',) * 2 + ([],),
    ("<tool_call>nonsense</tool_call> more",) * 2 + ([],),
    ('<tool_call>{"nam',) * 2 + ([],),
    ("<tool_call>",) * 2 + ([],),
    ("<tool_call>{}</tool_call>",) * 2 + ([],),
]
LLAMA_CASES = [
    ("Just {text}", "Just {text}", []),
    ('{"name": "add", "parameters": {"x": 1}}', "", [("add", '{"x": 1}')]),
    ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}', "", [("add", '{"x": 1}')]),
    (
        '\n{"name": "add", "parameters": {}}; {"name": "weather", "parameters": {}}',
        "",
        [("add", "{}"), ("weather", "{}")],
    ),
    ('{"name": "add", "parameters": {}}\n{"name": "add", "parameters": {}}', "", [("add", "{}"), ("add", "{}")]),
    ('{"name": "add", "parameters": {}} done', "done", [("add", "{}")]),
    ('{"answer": 42}', '{"answer": 42}', []),
    ('{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
    ('{"name": "Bob"} {"name": "add", "parameters": {}}',) * 2 + ([],),
    ("{never", "{never", []),
]
CASES = [(HERMES, *case) for case in HERMES_CASES] + [(LLAMA3, *case) for case in LLAMA_CASES]


@pytest.mark.parametrize(("form", "output", "text", "calls"), CASES)
@given(data=st.data())
def test_stream_at_any_borders(
    form: ToolFormat, output: str, text: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    parts = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    numbers = count()
    parser = ToolCallParser(form, NAMES, new_id=lambda: f"call_{next(numbers)}")
    news = [*(parser.push(part) for part in parts), parser.finish()]
    assert "".join(shown for shown, _ in news) == text
    deltas = [delta for _, more in news for delta in more]
    for i, (name, arguments) in enumerate(calls):
        mine = [delta for delta in deltas if delta.index == i]
        assert mine[0] == ToolDelta(i, id=f"call_{i}", name=name)
        assert all(delta.id == "" and delta.name == "" for delta in mine[1:])
        assert "".join(delta.arguments for delta in mine) == arguments
    assert parser.calls == len(calls) and all(delta.index < len(calls) for delta in deltas)


@pytest.mark.parametrize(("form", "output", "text", "calls"), CASES)
def test_whole_outputs(form: ToolFormat, output: str, text: str, calls: list[tuple[str, str]]) -> None:
    shown, parsed = parse_tool_calls(form, NAMES, output)
    assert (shown, [(call.name, call.arguments) for call in parsed]) == (text, calls)
    assert len({call.id for call in parsed}) == len(parsed) and all(call.id.startswith("call_") for call in parsed)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('Hm. <tool_call>{"name": "add", "arg') == ("Hm.", [])
    assert [delta.name for delta in parser.push('uments": {"x')[1]] == ["add", ""]
    assert parser.push('": 1')[1] == [ToolDelta(0, arguments='": 1')]
    assert parser.push("}}</tool_call>")[1] == [ToolDelta(0, arguments="}")]


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_any_arguments_survive(value: object) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    output = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    text, calls = parse_tool_calls(HERMES, NAMES, output)
    assert text == "" and [call.arguments for call in calls] == [arguments]

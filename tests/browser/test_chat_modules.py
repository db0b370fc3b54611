"""Modules of the chat page on their own: the reader of events, Markdown, stored values, requests, keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..service.live import behaviour, live, says

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MARKUP = """const markup = node => typeof node === "string" ? node :
  `<${[node.tag, node.address, node.language, node.number > 1 ? node.number : "", node.side === "left" ? "" : node.side]
    .filter(Boolean).join(" ")}>${node.children.map(markup).join("")}</${node.tag}>`;"""


@pytest.fixture(scope="module")
def modules(browser: Browser) -> Iterator[Page]:
    """A tab in which the modules can be imported."""
    with live(behaviour(says("hi"))) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/chat")
        yield page
        context.close()


def call(page: Page, module: str, function: str, argument: Any = None) -> Any:
    """The result of a JavaScript function `(module, argument) => ...`."""
    script = f"async argument => ({function})(await import('/dashboard/chat/{module}.js'), argument)"
    return page.evaluate(script, argument)


# --- events


STREAM = (
    ': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:one\ndata: two\n\ndata\n\n\ndata: three\r\rid: 7\n\ndata: half'
)


def test_events_are_the_same_however_the_stream_is_cut(modules: Page) -> None:
    read = """({EventReader}, [text, size]) => {
      const reader = new EventReader(), events = [];
      for (let place = 0; place < text.length; place += size) events.push(...reader.read(text.slice(place, place + size)));
      return events;
    }"""
    for size in (1, 2, 3, 5, len(STREAM)):
        assert call(modules, "events", read, [STREAM, size]) == ['{"a": 1}', "one\ntwo", "", "three"], size


def test_a_stream_that_ends_early_is_an_error(modules: Page) -> None:
    read = """async ({jsonEvents}, text) => {
      const bytes = new TextEncoder().encode(text), events = [];
      const stream = new ReadableStream({start(control) {
        for (const byte of bytes) control.enqueue(new Uint8Array([byte]));
        control.close();
      }});
      try { for await (const event of jsonEvents(stream)) events.push(event); } catch (error) { events.push(error.message); }
      return events;
    }"""
    whole = 'data: {"text": "é€😀"}\n\ndata: [DONE]\n\ndata: 7\n\n'
    assert call(modules, "events", read, whole) == [{"text": "é€😀"}]
    assert call(modules, "events", read, "data: 1\n\n") == [1, "The connection ended before the answer did."]


# --- Markdown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "a **b** *c* `d*` ~~e~~ __f__",
            "<p>a <strong>b</strong> <em>c</em> <code>d*</code> <del>e</del> <strong>f</strong></p>",
        ),
        (
            "***a*** *b**c* **d *e* f**",
            "<p><em><strong>a</strong></em> <em>b**c</em> <strong>d <em>e</em> f</strong></p>",
        ),
        ("*foo**bar*", "<p><em>foo**bar</em></p>"),
        ("snake_case_word 2 * 3 * 4 **open", "<p>snake_case_word 2 * 3 * 4 **open</p>"),
        ("这是**重要。**文字", "<p>这是<strong>重要。</strong>文字</p>"),
        (r"\*a\* \<", "<p>*a* <</p>"),
        ("`` a`b `` `c", "<p><code>a`b</code> `c</p>"),
        ("a\nb", "<p>a<br></br>b</p>"),
        ('[a *b*](https://x.y/z_(1) "t")', "<p><a https://x.y/z_(1)>a <em>b</em></a></p>"),
        ("[a](javascript:alert(1)) [b](data:x)", "<p>[a](javascript:alert(1)) [b](data:x)</p>"),
        (
            "![a](http://x/i.png) ![](http://x/j.png)",
            "<p><a http://x/i.png>a</a> <a http://x/j.png>http://x/j.png</a></p>",
        ),
        (
            "(see https://x.y/z). <http://q>",
            "<p>(see <a https://x.y/z>https://x.y/z</a>). <a http://q>http://q</a></p>",
        ),
        ("<b>x</b> &amp;", "<p><b>x</b> &amp;</p>"),
        ("# a #\n### b\n#c", "<h1>a</h1> <h3>b</h3> <p>#c</p>"),
        ("a\n\n---\n***\nb", "<p>a</p> <hr></hr> <hr></hr> <p>b</p>"),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote> <p>c</p>"),
        ("```py x\na\n\n  b\n```\nc", "<pre py>a\n\n  b</pre> <p>c</p>"),
        ("````\n```\n````", "<pre>```</pre>"),
        ("~~~\n```\n", "<pre>```\n</pre>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", "<ol 3><li>a</li><li>b</li></ol>"),
        (
            "1. a\n   - b\n   - c\n2. d\n\n   e",
            "<ol><li><p>a</p><ul><li>b</li><li>c</li></ul></li><li><p>d</p><p>e</p></li></ol>",
        ),
        ("- a\n  ```\n  b\n\n  c\n  ```\n- d", "<ul><li>a<pre>b\n\nc</pre></li><li>d</li></ul>"),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("- [ ] a\n- [x] b", "<ul><li>☐ a</li><li>☑ b</li></ul>"),
        ("It was\n1984. A year", "<p>It was<br></br>1984. A year</p>"),
        (
            "|a|b|\n|:-:|-:|\n|`x\\|y`|1|\n|2|",
            "<table><thead><tr><th center>a</th><th right>b</th></tr></thead>"
            "<tbody><tr><td center><code>x|y</code></td><td right>1</td></tr>"
            "<tr><td center>2</td><td right></td></tr></tbody></table>",
        ),
        ("a | b\nc", "<p>a | b<br></br>c</p>"),
    ],
)
def test_markdown(modules: Page, text: str, expected: str) -> None:
    shown = call(
        modules, "markdown", f"({{parse}}, text) => {{ {MARKUP} return parse(text).map(markup).join(' '); }}", text
    )
    assert shown == expected


PATTERNS = (
    "*",
    "*a ",
    "*a**b",
    "_a_",
    "`",
    "`a``b```",
    "[",
    "[a](",
    '[a](b "',
    "![a](http://b",
    ">",
    "> ",
    "- ",
    "- a\n",
)
MORE_PATTERNS = (
    "  - a\n",
    "#",
    " ",
    "~~a",
    "<http://",
    "http://",
    "http://a)",
    "|a|\n|-|\n",
    "```\n",
    "- a\n\n",
    "](((a)",
)


TIME_IT = "({parse}, text) => { const began = performance.now(); parse(text); return performance.now() - began; }"


@pytest.mark.parametrize("pattern", PATTERNS + MORE_PATTERNS)
def test_hostile_markdown_takes_linear_time(modules: Page, pattern: str) -> None:
    """A quadratic parser would take minutes, one that recurses without a limit would fail."""
    assert call(modules, "markdown", TIME_IT, pattern * (200_000 // len(pattern)) + " x") < 10_000


@pytest.mark.parametrize(("begin", "end"), [("[a](", "b"), ("[a](b", "c"), ("a|b\n-", "b"), ("```", "`")])
def test_spaces_without_end_take_linear_time(modules: Page, begin: str, end: str) -> None:
    assert call(modules, "markdown", TIME_IT, begin + " " * 200_000 + end) < 10_000


HOSTILE = (
    "<script>window.bad = 1</script>",
    "<img src=x onerror='window.bad = 1'>",
    "[a](javascript:window.bad=1) [b](JaVaScRiPt:1) [c](&#106;avascript:1) [d](\tjavascript:1) <javascript:1>",
    "![a](http://evil.example/leak.png)",
    "```\n</code></pre><script>window.bad = 1</script>\n```",
    '```"><script>window.bad = 1</script>\nx\n```',
    '[a](https://x.example/"onclick="window.bad=1)',
    "|<iframe src=javascript:1>|\n|-|\n|<svg onload=window.bad=1>|",
)


def test_hostile_markdown_makes_no_scripts_and_loads_nothing(modules: Page) -> None:
    requests: list[str] = []
    modules.on("request", lambda request: requests.append(request.url))
    show = """({render}, text) => {
      const target = document.createElement("div");
      document.body.append(target);
      render(target, text);
      const all = [...target.querySelectorAll("*")];
      const result = [all.map(part => part.localName), all.flatMap(part => part.getAttributeNames()),
        all.filter(part => part.href).map(part => part.protocol), target.textContent];
      target.remove();
      return result;
    }"""
    for text in HOSTILE:
        tags, attributes, protocols, shown = call(modules, "render", show, text)
        assert not {"script", "img", "iframe", "svg"} & set(tags), text
        assert set(attributes) <= {"class", "href", "title", "target", "rel", "type", "start"}, text
        assert set(protocols) <= {"https:", "http:"}, text
        assert shown
    modules.wait_for_timeout(100)
    assert modules.evaluate("window.bad") is None
    assert [url for url in requests if "/dashboard/" not in url] == []


def test_a_text_that_grows_ends_as_the_whole_text(modules: Page) -> None:
    """Blocks that stay the same keep their elements, and the result is that of rendering the text at once."""
    grow = """({render}, texts) => texts.filter(text => {
      const growing = document.createElement("div"), whole = document.createElement("div");
      for (let end = 0; end <= text.length; end++) render(growing, text.slice(0, end));
      render(whole, text);
      return growing.outerHTML !== whole.outerHTML;
    })"""
    rng = random.Random(7)
    signs = [
        "*",
        "**",
        "_",
        "`",
        "```\n",
        "[",
        "](http://a)",
        "- ",
        "1. ",
        "> ",
        "|",
        "|-|\n",
        "\n",
        "\n\n",
        "# ",
        "  ",
        "a",
        "b ",
    ]
    texts = ["".join(rng.choices(signs, k=40)) for _ in range(100)]
    assert call(modules, "render", grow, texts) == []
    keep = """({render}) => {
      const target = document.createElement("div");
      render(target, "first\\n\\nsecond");
      const [first, second] = target.children;
      render(target, "first\\n\\nsecond part");
      return [target.children[0] === first, target.children[1] === second];
    }"""
    assert call(modules, "render", keep) == [True, False]


def test_the_browser_refuses_html_from_strings(modules: Page) -> None:
    refused = modules.evaluate("""() => {
      try { document.body.innerHTML = "<b>x</b>"; return ""; } catch (error) { return error.message; }
    }""")
    assert "TrustedHTML" in refused


# --- answers


FOLD = """({newReply}, events) => import("/dashboard/chat/answer.js").then(({take, figuresOf}) => {
  const reply = newReply("m");
  for (const [elapsed, event] of events) take(reply, event, elapsed);
  return [reply, figuresOf(reply)];
})"""


def event(tokens: int, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 20, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 16}}
    return {"choices": [{"delta": delta, "finish_reason": finish}], "usage": usage}


def test_figures_count_from_the_first_token(modules: Page) -> None:
    events = [
        [100, event(0, role="assistant")],
        [200, event(1, reasoning_content="so ")],
        [1200, event(3, reasoning_content="it is")],
        [1700, event(4, content="Yes")],
        [2200, event(9, "length", content="!")],
        [5000, event(9)],
    ]
    reply, figures = call(modules, "conversation", FOLD, events)
    assert (reply["content"], reply["reasoning"], reply["finish"]) == ("Yes!", "so it is", "length")
    assert reply["figures"]["thought"] == 1000
    assert figures == "first token after 200 ms · 4 tokens/s · 20 tokens in (16 cached), 9 out · cut at the token limit"


def test_fields_without_effect_are_named(modules: Page) -> None:
    show = "({figuresOf}) => figuresOf({figures: {}, finish: 'stop', ignored: 'reasoning_effort'})"
    assert call(modules, "answer", show) == "without effect on this model: reasoning_effort"


@pytest.mark.parametrize(("reason", "replacement"), [("flagged", "No."), ("unjudged", "")])
def test_a_withdrawal_takes_everything(modules: Page, reason: str, replacement: str) -> None:
    last = event(3, "content_filter")
    last["choices"][0]["withdrawal"] = {"reason": reason, "replacement": replacement}
    events = [[1, event(1, reasoning_content="secret")], [2, event(2, content="secret")], [3, last]]
    reply, _ = call(modules, "conversation", FOLD, events)
    assert (reply["content"], reply["reasoning"], reply["withdrawn"]) == (replacement, "", reason)


# --- conversations


def reply(content: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "content": content,
        "reasoning": "",
        "finish": "stop",
        "error": "",
        "withdrawn": "",
        **changes,
    }


def turn(content: str, *columns: str) -> dict[str, Any]:
    return {"content": content, "columns": [{"shown": 0, "replies": [reply(text)]} for text in columns]}


def messages(page: Page, turns: list[dict[str, Any]], place: int, system: str = "") -> list[str]:
    conversation = {"turns": turns, "settings": {"system": system}}
    sent = call(
        page, "conversation", "({messagesFor}, [talk, place]) => messagesFor(talk, place)", [conversation, place]
    )
    return [f"{message['role']}: {message['content']}" for message in sent]


def test_a_model_sees_its_own_answers(modules: Page) -> None:
    turns = [turn("a", "A0", "A1"), turn("b", "B0"), turn("c", "", "")]
    assert messages(modules, turns, 1) == ["user: a", "assistant: A1", "user: b", "assistant: B0", "user: c"]
    assert messages(modules, turns, 0, "Be kind.")[:3] == ["system: Be kind.", "user: a", "assistant: A0"]


def test_a_turn_without_an_answer_is_not_sent(modules: Page) -> None:
    assert messages(modules, [turn("a", ""), turn("b", "")], 0) == ["user: b"]


def test_editing_drops_what_follows(modules: Page) -> None:
    edit = """({editMessage, addReply}, talk) => {
      editMessage(talk, 1, "new");
      addReply(talk, talk.turns[1].columns[0], 0);
      return talk.turns.map(turn => [turn.content, turn.columns.length, turn.columns[0].replies.length, turn.columns[0].shown]);
    }"""
    talk = {"settings": {"models": ["m", "n"]}, "turns": [turn("a", "A"), turn("b", "B"), turn("c", "C")]}
    assert call(modules, "conversation", edit, talk) == [["a", 1, 1, 0], ["new", 2, 2, 1]]


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ("a b c", "a b c", "Both answers are equal."),
        ("a b c", "a b d e", "The answers agree in their first 2 words of 3 and 4."),
        ("a b", "a b c", "The answers agree in their first 2 words of 2 and 3."),
        ("x", "y", "The answers differ from the first word on."),
    ],
)
def test_agreement(modules: Page, first: str, second: str, sentence: str) -> None:
    assert call(modules, "conversation", "({agreement}, [a, b]) => agreement(a, b)", [first, second]) == sentence


MEMORY = """const memory = (items = {}, limit = Infinity) => ({
  items, get length() { return Object.keys(items).length; }, key: place => Object.keys(items)[place],
  getItem: key => items[key] ?? null, removeItem: key => { delete items[key]; },
  setItem(key, value) { if (value.length > limit) throw new Error("full"); items[key] = value; },
});"""


def test_what_cannot_be_read_in_the_storage_is_skipped(modules: Page) -> None:
    items = {
        "ridgeline-chat:a": '{"id": "a", "changed": 1, "turns": []}',
        "ridgeline-chat:b": '{"id": "b", "changed": 2, "turns": [], "settings": {"models": 7, "numbers": {"seed": "x"}}}',
        "ridgeline-chat:c": "not JSON",
        "ridgeline-chat:d": '{"id": "d", "turns": [{"content": "x", "columns": [{"shown": 3, "replies": []}]}]}',
        "ridgeline-chat-settings": "null",
        "other": "x",
    }
    read = f"({{Store}}, items) => {{ {MEMORY} const store = new Store(memory(items)); return [store.all(), store.settings()]; }}"
    kept, settings = call(modules, "store", read, items)
    assert [conversation["id"] for conversation in kept] == ["b", "a"]
    assert kept[0]["settings"] == settings and settings["models"] == [""] and settings["numbers"] == {}


def test_a_full_storage_is_reported(modules: Page) -> None:
    write = f"""({{Store}}) => {{ {MEMORY}
      const store = new Store(memory({{}}, 100)), talk = {{id: "a", turns: []}};
      return [store.write(talk), store.write({{...talk, text: "x".repeat(100)}})];
    }}"""
    assert call(modules, "store", write) == [True, False]


# --- requests and keys


def test_empty_settings_are_not_sent(modules: Page) -> None:
    make = "({requestBody, emptySettings}, changes) => requestBody({...emptySettings(), ...changes}, 'm', [])"
    assert set(call(modules, "sampling", make, {})) == {"model", "messages", "stream", "stream_options"}
    changes = {"numbers": {"seed": 7}, "stop": "a\n\nb c\n", "effort": "low"}
    body = call(modules, "sampling", make, changes)
    assert (body["seed"], body["stop"], body["reasoning_effort"]) == (7, ["a", "b c"], "low")


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ({"key": "Escape"}, "escape"),
        ({"key": "k", "ctrlKey": True}, "search"),
        ({"key": "k", "metaKey": True}, "search"),
        ({"key": "O", "ctrlKey": True, "shiftKey": True}, "new"),
        ({"key": ".", "ctrlKey": True}, "settings"),
        ({"key": "/", "ctrlKey": True}, "help"),
        ({"key": "k"}, None),
        ({"key": "k", "ctrlKey": True, "altKey": True}, None),
        ({"key": "Escape", "isComposing": True}, None),
    ],
)
def test_shortcuts(modules: Page, key: dict[str, Any], command: str | None) -> None:
    assert call(modules, "keys", "({commandOf}, event) => commandOf(event)", key) == command

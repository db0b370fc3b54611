"""The chat page: what it keeps, sends and shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..service.live import Live, behaviour, counts, live, says
from .chat import answers, ask, bodies, emptied, ended, open_chat

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ANSWER = """<think>They want *code*.</think>Some **code**:

```python
print("<b>x</b>")
```

- one
- two
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(behaviour(says(ANSWER))) as running:
        yield running


@pytest.fixture(scope="module")
def endless() -> Iterator[Live]:
    with live(behaviour(counts, delay=0.005)) as running:
        yield running


def titles(page: Page) -> list[str]:
    return page.locator("#history .choose").all_inner_texts()


# --- what is shown


def test_an_answer_is_markdown_with_folded_thoughts(page: Page, server: Live) -> None:
    errors = open_chat(page, server)
    ask(page, "Write **some** code")
    answer = page.locator(".said.assistant")
    assert page.locator(".said.user").inner_text() == "Write **some** code", "a message of the user stays as it is"
    assert answer.locator("strong").inner_text() == "code" and answer.locator("li").count() == 2
    assert answer.locator("pre").inner_text() == 'print("<b>x</b>")'
    assert "They want" not in answer.inner_text() and "Thought for " in answer.inner_text()
    answer.locator("summary").click()
    assert answer.locator(".thought em").inner_text() == "code"
    figures = page.locator(".figures").inner_text()
    assert "first token after " in figures and " tokens/s · " in figures and " tokens in (" in figures
    assert errors == []


def test_code_and_answers_can_be_copied(page: Page, server: Live) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_chat(page, server)
    ask(page, "hi")
    page.click(".code button")
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>x</b>")'
    page.click(".reply .tools button:has-text('Copy')")
    page.locator(".reply .tools button:has-text('Copied')").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER.partition("</think>")[2]


def test_everything_comes_from_the_server(page: Page) -> None:
    text = "![x](http://evil.example/x.png) <img src='http://evil.example/y.png'> [z](http://evil.example)"
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    with live(behaviour(says(text))) as server:
        errors = open_chat(page, server)
        ask(page, "hi")
        assert page.locator(".said.assistant a").count() == 3
        assert page.locator(".said.assistant a").first.get_attribute("rel") == "noopener noreferrer nofollow"
        assert len(urls) > 10 and all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in urls)
        assert errors == []


def test_a_failed_answer_can_be_tried_again(page: Page) -> None:
    with live(behaviour(says("Hello there"), fail_after=3)) as server:
        open_chat(page, server)
        sent = bodies(page)
        ask(page, "hi")
        assert "The step failed" in page.locator(".said.assistant.failed .problem").inner_text()
        server.engine.behaviour.fail_after = None
        page.get_by_text("Try again").click()
        ended(page)
        assert answers(page) == ["Hello there"] and page.locator(".failed").count() == 0
        assert [body["messages"] for body in sent] == [[{"role": "user", "content": "hi"}]] * 2


def test_a_server_that_is_gone_is_named(page: Page) -> None:
    with live(behaviour(says("hi"))) as server:
        open_chat(page, server)
    ask(page, "hi")
    assert answers(page) == ["The server cannot be reached."]


def test_the_key_is_asked_for(page: Page) -> None:
    with live(behaviour(says("Hello there")), api_key="sesame") as server:
        page.goto(f"http://127.0.0.1:{server.port}/chat")
        page.fill("input[name=key]", "sesame")
        page.get_by_text("Save in this browser").click()
        page.locator("#model:has-text('tiny-test')").wait_for()
        ask(page, "hi")
        assert answers(page) == ["Hello there"]


# --- what is kept


def test_a_conversation_survives_a_reload(page: Page, server: Live) -> None:
    errors = open_chat(page, server)
    ask(page, "first question")
    ask(page, "second question")
    shown, figures = answers(page), page.locator(".figures").all_inner_texts()
    page.reload()
    page.locator("#model:has-text('tiny-test')").wait_for()
    assert page.locator(".said.user").all_inner_texts() == ["first question", "second question"]
    assert (answers(page), page.locator(".figures").all_inner_texts()) == (shown, figures) and len(shown) == 2
    sent = bodies(page)
    ask(page, "third question")
    assert [message["role"] for message in sent[0]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert sent[0]["messages"][1]["content"].startswith("Some **code**:"), "thoughts are not sent again"
    assert errors == []


def test_conversations_are_listed_searched_and_deleted(page: Page, server: Live) -> None:
    open_chat(page, server)
    for words in ("about apples", "about pears"):
        ask(page, words)
        page.keyboard.press("Control+Shift+O")
        emptied(page)
    assert titles(page) == ["about pears", "about apples"]
    page.keyboard.press("Control+K")
    page.keyboard.type("APPLES")
    assert titles(page) == ["about apples"]
    page.keyboard.press("Enter")
    page.locator(".said.user:has-text('about apples')").wait_for()
    page.fill("#history input", "")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_label("Delete about apples").click()
    emptied(page)
    assert titles(page) == ["about pears"]
    page.click("#clear-all")
    assert titles(page) == [] and page.evaluate("localStorage.length") == 0


def test_the_back_button_opens_the_earlier_conversation(page: Page, server: Live) -> None:
    open_chat(page, server)
    ask(page, "about apples")
    page.click("#clear")
    emptied(page)
    page.go_back()
    page.locator(".said.user:has-text('about apples')").wait_for()


def test_half_an_answer_survives_a_reload(page: Page, endless: Live) -> None:
    open_chat(page, endless)
    page.fill("#words", "count")
    page.click("#send")
    page.locator(".said.assistant:has-text('abcabc')").wait_for()
    page.reload()
    assert answers(page)[0].startswith("abcabc")
    assert page.locator(".figures").inner_text().endswith("stopped")


def test_a_full_storage_is_said(page: Page, server: Live) -> None:
    open_chat(page, server)
    page.evaluate("""() => {
      for (let size = 1 << 22; size >= 1; size >>= 1)
        try { for (let part = 0; ; part++) localStorage.setItem(`${size}/${part}`, "x".repeat(size)); } catch { /* full */ }
    }""")
    ask(page, "hi")
    page.get_by_text("This browser's storage is full").wait_for()
    assert len(answers(page)) == 1


def test_another_tab_adds_its_conversation_to_the_list(page: Page, server: Live) -> None:
    open_chat(page, server)
    other = page.context.new_page()
    open_chat(other, server)
    ask(other, "from the other tab")
    page.locator("#history .choose:has-text('from the other tab')").wait_for()


# --- what can be done with answers and messages


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_an_answer_is_stopped(page: Page, endless: Live, way: str) -> None:
    open_chat(page, endless)
    cancels = len(endless.engine.cancels)
    page.fill("#words", "count")
    page.press("#words", "Enter")
    page.locator(".said.assistant:has-text('abc')").wait_for()
    if way == "button":
        page.click("#send")
    else:
        page.keyboard.press("Escape")
    ended(page)
    endless.until(lambda: len(endless.engine.cancels) > cancels)
    assert page.locator(".figures").inner_text().endswith("stopped")
    sent = bodies(page)
    page.fill("#words", "go on")
    page.press("#words", "Enter")
    page.locator(".running").wait_for()
    assert sent[0]["messages"][1]["content"].startswith("abc"), "what arrived is part of the conversation"
    page.keyboard.press("Escape")
    ended(page)


def test_an_answer_is_generated_again(page: Page) -> None:
    with live(behaviour(says("first"))) as server:
        open_chat(page, server)
        ask(page, "hi")
        server.engine.behaviour.script = says("second")
        page.get_by_text("Regenerate").click()
        ended(page)
        assert answers(page) == ["second"] and page.locator(".reply .tools span").inner_text() == "2/2"
        page.get_by_title("Earlier answer").click()
        assert answers(page) == ["first"]
        page.reload()
        page.locator("#model:has-text('tiny-test')").wait_for()
        assert answers(page) == ["first"], "the choice is kept"
        sent = bodies(page)
        ask(page, "more")
        assert [message["content"] for message in sent[0]["messages"]] == ["hi", "first", "more"]
        assert page.get_by_text("Regenerate").count() == 1, "only at the end"


def test_a_message_is_edited(page: Page, server: Live) -> None:
    open_chat(page, server)
    ask(page, "one")
    ask(page, "two")
    sent = bodies(page)
    page.locator(".message .edit").first.click()
    assert page.locator(".editor textarea").input_value() == "one"
    page.keyboard.press("Escape")
    assert page.locator(".editor").count() == 0 and page.locator(".said.user").count() == 2
    page.locator(".message .edit").first.click()
    page.fill(".editor textarea", "three")
    page.press(".editor textarea", "Enter")
    page.locator(".said.user:has-text('three')").wait_for()
    ended(page)
    assert page.locator(".said.user").all_inner_texts() == ["three"] and titles(page) == ["three"]
    assert [body["messages"] for body in sent] == [[{"role": "user", "content": "three"}]]


def test_an_answer_is_edited(page: Page, server: Live) -> None:
    open_chat(page, server)
    ask(page, "one")
    page.click(".reply .edit")
    page.fill(".editor textarea", "My **own** words")
    page.get_by_text("Save").click()
    assert page.locator(".said.assistant strong").inner_text() == "own"
    sent = bodies(page)
    ask(page, "two")
    assert sent[0]["messages"][1] == {"role": "assistant", "content": "My **own** words"}


# --- settings


def test_settings_are_sent_and_kept(page: Page, server: Live) -> None:
    open_chat(page, server)
    sent = bodies(page)
    page.keyboard.press("Control+.")
    values: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "max_tokens": 5}
    values |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    for name, value in values.items():
        page.fill(f"#settings [name={name}]", str(value))
    page.fill("#settings [name=system]", "Be kind.")
    page.fill("#settings [name=stop]", "END")
    page.select_option("#settings [name=effort]", "low")
    ask(page, "hi")
    expected = {**values, "stop": ["END"], "reasoning_effort": "low", "model": "tiny-test"}
    assert {name: sent[0].get(name) for name in expected} == expected
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert "5 out · cut at the token limit" in page.locator(".figures").inner_text()
    page.reload()
    page.locator("#model:has-text('tiny-test')").wait_for()
    page.click("#clear")
    ask(page, "a new conversation starts with them")
    assert sent[1]["seed"] == 7 and sent[1]["messages"][0]["content"] == "Be kind."
    page.keyboard.press("Control+.")
    page.fill("#settings [name=seed]", "")
    ask(page, "an empty field is not sent")
    assert "seed" not in sent[2]


def test_a_wrong_setting_is_not_sent(page: Page, server: Live) -> None:
    open_chat(page, server)
    sent = bodies(page)
    page.keyboard.press("Control+.")
    page.fill("#settings [name=temperature]", "9")
    page.keyboard.press("Control+.")
    page.fill("#words", "hi")
    page.press("#words", "Enter")
    assert page.locator("#settings [name=temperature]:invalid").is_visible()
    assert page.input_value("#words") == "hi" and sent == [] and page.locator(".said").count() == 0


# --- keyboard and screens


def test_keys_of_the_message_field(page: Page, server: Live) -> None:
    open_chat(page, server)
    page.click("#words")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    ended(page)
    assert page.locator(".said.user").inner_text() == "one\ntwo"
    page.click("#words")
    page.keyboard.press("ArrowUp")
    assert page.locator(".editor textarea").input_value() == "one\ntwo"
    page.keyboard.press("Escape")
    page.keyboard.press("Control+/")
    assert page.locator("#help").is_visible() and "search the conversations" in page.locator("#help").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_a_narrow_screen(page: Page, server: Live) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    errors = open_chat(page, server)
    assert not page.locator("#history").is_visible() and not page.locator("#settings").is_visible()
    ask(page, "hi " * 40)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0
    send = page.locator("#send").bounding_box()
    assert send is not None and send["y"] + send["height"] <= 640, "the field stays on the screen"
    page.click("#menu")
    assert page.locator("#history").is_visible()
    page.click("#tune")
    assert page.locator("#settings").is_visible() and not page.locator("#history").is_visible()
    page.click("#menu")
    page.locator("#history .choose").click()
    assert not page.locator("#history").is_visible() and page.evaluate(overflow) <= 0
    assert errors == []


def test_a_phone(browser: Browser, server: Live) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page = context.new_page()
    errors = open_chat(page, server)
    page.tap("#words")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    assert page.input_value("#words") == "one\ntwo", "a keyboard on the screen has no Shift+Enter"
    page.tap("#send")
    ended(page)
    assert page.locator(".said.user").inner_text() == "one\ntwo" and errors == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable(page: Page, server: Live, scheme: str) -> None:
    """The contrast of text and ground is at least that of WCAG 2.2, level AA: 4.5."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    open_chat(page, server)
    ask(page, "hi")
    contrast = """selector => {
      const part = document.querySelector(selector);
      let ground = part;
      while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
      const light = color => {
        const linear = value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
        const [r, g, b] = color.match(/[\\d.]+/g).map(value => linear(value / 255));
        return .2126 * r + .7152 * g + .0722 * b;
      };
      const both = [light(getComputedStyle(part).color), light(getComputedStyle(ground).backgroundColor)];
      return (Math.max(...both) + .05) / (Math.min(...both) + .05);
    }"""
    for selector in (
        ".said.user",
        ".said.assistant p",
        ".thought summary",
        ".code pre",
        ".figures",
        ".reply .tools button",
    ):
        assert page.evaluate(contrast, selector) >= 4.5, selector

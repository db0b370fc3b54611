"""Whether the figures that the chat page shows are right, and what its Markdown costs:

    python benchmarks/chat_page.py --out benchmarks/results/chat_page.json

A server of the shipped model on a CPU answers the chat page in Debian's Chromium (Playwright). Row `chat-figures` has the medians
over the rounds of time to first token and tokens per second, as the page shows them and as the server's record of the same
request has them, and of the page's tokens per second in percent of the server's. Row `chat-markdown`: milliseconds to parse a
long answer, to draw it, and to draw it again with one more word, as in a stream; and the longest time that parsing a hostile text
of the same length takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from typing import Any

import uvloop
from common import cpu_name, provenance, write_rows
from playwright.async_api import Page, async_playwright

from ridgeline.bench.server_process import serving

PROMPT = "Tell me a story about a lighthouse."
SETTINGS = {"numbers": {"temperature": 0, "max_tokens": 256}}
ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
ANSWER = """## Part

Some *words* with **weight**, `code` and a [link](https://example.org/a).

- one
  - two
- three

```python
def f(x):
    return x + 1
```

| name | value |
|---|--:|
| a | 1 |

"""
HOSTILE = (
    "*",
    "*a ",
    "*a**b",
    "`a``b```",
    "[",
    "[a](",
    "> ",
    "- a\n",
    "  - a\n",
    "~~a",
    "http://",
    "|a|\n|-|\n",
    "- a\n\n",
)
LATEST = """() => JSON.parse(Object.entries(localStorage).filter(([key]) => key.startsWith("ridgeline-chat:"))
  .map(([, value]) => value).sort((a, b) => JSON.parse(b).changed - JSON.parse(a).changed)[0])"""
MARKDOWN = """async ([answer, hostile]) => {
  const {parse} = await import("/dashboard/chat/markdown.js"), {render} = await import("/dashboard/chat/render.js");
  const timed = work => { const began = performance.now(); work(); return performance.now() - began; };
  const target = document.createElement("div");
  document.body.append(target);
  const drawn = text => timed(() => { render(target, text); target.getBoundingClientRect(); });
  const result = {parse_ms: timed(() => parse(answer)), draw_ms: drawn(answer), word_ms: drawn(answer + " word")};
  target.remove();
  return {...result, hostile_ms: Math.max(...hostile.map(text => timed(() => parse(text))))};
}"""


async def ask(page: Page, url: str) -> dict[str, float]:
    """Milliseconds to the first token and tokens per second after it, as the page and the server have them."""
    await page.goto(f"{url}/chat")
    await page.evaluate("settings => localStorage.setItem('ridgeline-chat-settings', settings)", json.dumps(SETTINGS))
    await page.reload()
    await page.locator("#settings [name=first] option").first.wait_for(state="attached")
    await page.fill("#words", PROMPT)
    async with page.expect_response("**/v1/chat/completions") as answer:
        await page.press("#words", "Enter")
    name = (await answer.value).headers["x-request-id"]
    await page.locator(".again").wait_for()
    shown = (await page.evaluate(LATEST))["turns"][0]["columns"][0]["replies"][0]["figures"]
    record = await page.evaluate("name => fetch(`/requests/${name}`).then(answer => answer.json())", name)
    assert record["output_tokens"] == shown["output"]
    return {
        "page_first_ms": shown["first"],
        "server_first_ms": record["ttft_s"] * 1e3,
        "page_tokens_s": (shown["output"] - shown["firstTokens"]) / (shown["last"] - shown["first"]) * 1e3,
        "server_tokens_s": 1 / record["tpot_s"],
    }


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = ["--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "2048"]
    async with serving(options) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        page = await browser.new_page()
        rounds = [await ask(page, url) for _ in range(arguments.rounds + 1)][1:]  # the first one warms up
        text = ANSWER * (arguments.characters // len(ANSWER))
        hostile = [pattern * (arguments.characters // len(pattern)) for pattern in HOSTILE]
        costs = [await page.evaluate(MARKDOWN, [text, hostile]) for _ in range(arguments.rounds)]
        await browser.close()
    about = {"rounds": arguments.rounds, **provenance(cpu_name(), arguments.commit)}
    figures = {name: round(statistics.median(figures[name] for figures in rounds), 1) for name in rounds[0]}
    shares = [100 * figures["page_tokens_s"] / figures["server_tokens_s"] for figures in rounds]
    figures["page_tokens_percent"] = round(statistics.median(shares), 1)
    markdown = {name: round(statistics.median(cost[name] for cost in costs), 1) for name in costs[0]}
    return [
        {"row": "chat-figures", **figures, "device": "cpu", **about},
        {"row": "chat-markdown", **markdown, "characters": len(text), **about},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--characters", type=int, default=20_000, help="length of the long answer")
    parser.add_argument("--commit", default="", help="the commit that runs, where there is no .git to ask")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    table = uvloop.run(measure(arguments))
    print(*map(json.dumps, table), sep="\n")
    if arguments.out:
        write_rows(arguments.out, table)


if __name__ == "__main__":
    main()

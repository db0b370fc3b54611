"""Conversations derived from training documents: questions whose answers stand in the corpus."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from random import Random

from corpus import Document
from synthetic import SYSTEM, Conversation, Message, pick

LONGEST_ANSWER = 1800  # characters
GENERIC_HEADINGS = frozenset(
    "motivation|summary|overview|introduction|background|description|examples|example|usage|see also|notes|note|remarks|"
    "requirements|syntax|parameters|references|abstract|rationale|conclusion|contents|prerequisites|before you begin|what's next|"
    "next steps|installation|alternatives|drawbacks|specification|unresolved questions|future possibilities|in this article|"
    "short description|long description|related links|inputs|outputs|exercises|solution|problem|return value|return values|"
    "property value|arguments|options|details|detailed design|security considerations|backwards compatibility|testing|other".split(
        "|"
    )
)
# First words of a docstring that turn into "a function that <verb>s".
VERBS = frozenset(
    "return create get compute convert add check set find remove generate calculate construct apply parse perform evaluate read "
    "test delete make initialize list determine update run write produce extract open fit send ensure call format try validate "
    "implement retrieve insert stop start iterate handle render build transform mark encode replace clear print decode load "
    "register close process provide represent attach copy indicate do display count emit notify raise compile predict estimate "
    "wrap append yield change split sort store filter search subtract turn expand show resolve rename execute rotate define "
    "adjust plot record multiply merge move select save join compare normalize reverse swap solve simplify sum draw print "
    "fetch collect configure install scale reset lookup verify draw sample divide map match serialize flatten group".split()
)


def ask(question: str, answer: str, rng: Random) -> Conversation:
    system: list[Message] = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.1 else []
    turns: list[Message] = [
        {"role": "user", "content": question.strip()},
        {"role": "assistant", "content": answer.strip()},
    ]
    return {"messages": system + turns, "tools": None}


def cut(paragraphs: list[str], limit: int) -> str:
    """The first paragraphs that fit `limit` characters together ("" if the first is longer)."""
    kept: list[str] = []
    for paragraph in paragraphs:
        if sum(map(len, kept)) + 2 * len(kept) + len(paragraph) > limit:
            break
        kept.append(paragraph)
    return "\n\n".join(kept)


def from_dialogue(document: Document, rng: Random) -> Iterator[Conversation]:
    """Turns as messages; turns of one speaker in a row are joined."""
    messages: list[Message] = []
    for line in document.text.strip().split("\n"):
        speaker, _, said = line.partition(": ")
        role = {"User": "user", "Assistant": "assistant"}.get(speaker)
        if role is None:
            return
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + said
        else:
            messages.append({"role": role, "content": said})
    if messages and messages[0]["role"] == "assistant":
        messages = messages[1:]
    if messages and messages[-1]["role"] == "user":
        messages.pop()
    if messages:
        yield {"messages": messages, "tools": None}


def from_math(document: Document, rng: Random) -> Iterator[Conversation]:
    """A word problem and its worked solution, the result in a last sentence."""
    match = re.fullmatch(r"Question: (.*?)\nAnswer: (.*)\n#### (.*?)\n?", document.text, re.DOTALL)
    if match:
        question, steps, result = match.groups()
        yield ask(question, f"{steps}\nThe answer is {result}.", rng)


def third_stem(verb: str) -> str:
    """ "returns" to "return", "applies" to "apply"."""
    return f"{verb[:-3]}y" if verb.endswith("ies") else verb[:-2] if verb[:-2] in VERBS else verb[:-1]


def third_person(sentence: str) -> str:
    """ "Return the sum." as it follows "a function that": "returns the sum"."""
    verb, _, rest = sentence.rstrip(".").partition(" ")
    verb = verb[0].lower() + verb[1:]
    if verb not in VERBS:
        return f"{verb} {rest}"
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        return f"{verb[:-1]}ies {rest}"
    return f"{verb}{'es' if verb.endswith(('ss', 'sh', 'ch', 'x', 'o')) else 's'} {rest}"


def from_code(document: Document, rng: Random) -> Iterator[Conversation]:
    """Every documented function as an answer to its own description; now and then the description as the answer."""
    lines = document.text.split("\n")
    for node in ast.walk(ast.parse(document.text)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        description = ast.get_docstring(node) or ""
        first = " ".join(description.split("\n\n")[0].split())
        sentence = re.split(r"(?<=[.!?])\s", first)[0].rstrip(":")
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        source = textwrap.dedent("\n".join(lines[start : node.end_lineno]))
        if not 15 <= len(sentence) <= 160 or len(source) > LONGEST_ANSWER or not sentence[0].isalpha():
            continue
        what = "method" if node.args.args and node.args.args[0].arg in ("self", "cls") else "function"
        answer = f"```python\n{source}\n```"
        verb = sentence.split()[0].lower()
        style = rng.random()
        if style < 0.15 and len(first) > 40 and len(node.body) > 1:
            docstring = node.body[0]
            undocumented = textwrap.dedent(
                "\n".join(lines[start : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno])
            )
            question = pick("What does this function do?|Explain this code.|What does this Python code do?", rng)
            yield ask(f"{question}\n\n```python\n{undocumented}\n```", first, rng)
        elif style < 0.6 and (verb in VERBS or (verb.endswith("s") and third_stem(verb) in VERBS)):
            question = pick("Write a Python {0} that {1}.|Write a {0} that {1}.|Implement a Python {0} that {1}.", rng)
            yield ask(question.format(what, third_person(sentence)), answer, rng)
        else:
            question = pick(
                "Write a Python {0} named `{1}`. {2}|Write the {0} `{1}` in Python. {2}|Implement `{1}` in Python: {2}",
                rng,
            )
            yield ask(question.format(what, node.name, sentence), answer, rng)


def from_docs(document: Document, rng: Random) -> Iterator[Conversation]:
    """Sections as answers to a question made of their heading."""
    parts = re.split(r"^(#{1,4}) (.+)$", document.text, flags=re.MULTILINE)
    title = parts[2].strip("# `*") if len(parts) > 2 and parts[1] == "#" else ""
    for heading, body in zip(parts[2::3], parts[3::3], strict=True):
        heading = heading.strip("# `*").rstrip(".:")
        answer = cut(body.strip().split("\n\n"), rng.choice([500, 900, LONGEST_ANSWER]))
        if len(answer) < 120 or answer.rstrip().endswith(":") or answer.count("```") % 2:
            continue
        if heading.lower() in GENERIC_HEADINGS or heading == title:
            if not title or len(title) > 60:
                continue
            question = pick("What is {0}?|Explain {0}.|Tell me about {0}.|What is {0} about?", rng).format(title)
        elif heading.endswith("?"):
            question = heading
        elif len(heading) > 70 or len(heading) < 4:
            continue
        elif heading.lower().startswith("how to "):
            question = f"How do I {heading[7:]}?"
        elif re.match(r"[A-Z][a-z]+ing ", heading):
            question = pick("Explain {0}.|Tell me about {0}.|What should I know about {0}?", rng).format(
                heading[0].lower() + heading[1:]
            )
        else:
            question = pick("What is {0}?|Explain {0}.|What does {0} mean?|Tell me about {0}.", rng).format(heading)
        if title and heading != title and rng.random() < 0.3:
            question += f" ({title})"
        yield ask(question, answer, rng)


def from_prose(document: Document, rng: Random) -> Iterator[Conversation]:
    """The opening as a story, the title as its subject for the short ones, and one place to go on from."""
    paragraphs = document.text.strip().split("\n\n")
    if document.source.startswith("global-asp/"):  # picture books: a title, then short lines
        title, story = paragraphs[0], cut(paragraphs[1:], 3500)
        if len(story) > 100:
            yield ask(
                pick("Tell me a story.|Tell me a short story.|Tell a story for children.|Please tell me a story!", rng),
                story,
                rng,
            )
            question = pick(
                'Tell me a story called "{0}".|Write a story with the title "{0}".|Write a children\'s story: {0}', rng
            )
            yield ask(question.format(title), story, rng)
        return
    body = [p for p in paragraphs if not re.match(r"(CHAPTER|Chapter|[IVXLC]+\b|Section|BOOK|PART)", p) and len(p) > 40]
    opening = cut(body, LONGEST_ANSWER)
    if len(opening) > 300 and rng.random() < 0.5:
        asks = "Write the beginning of a chapter.|Begin a novel.|Write the opening of a story.|Tell me a long story.|Write a page of a novel."
        yield ask(pick(asks, rng), opening, rng)
    if len(body) > 8:
        at = rng.randrange(len(body) - 6)
        given, rest = cut(body[at : at + 2], 900), cut(body[at + 2 :], 1500)
        if given and len(rest) > 200:
            asks = "Continue this text:\n\n{0}|Continue the story:\n\n{0}|Go on with this text.\n\n{0}|Write the next paragraphs.\n\n{0}"
            yield ask(pick(asks, rng).format(given), rest, rng)


DERIVE = {"prose": from_prose, "docs": from_docs, "code": from_code, "math": from_math, "dialogue": from_dialogue}


def derive(document: Document, rng: Random) -> Iterator[Conversation]:
    """All conversations that `document` gives."""
    yield from DERIVE[document.kind](document, rng)

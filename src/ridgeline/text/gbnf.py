"""GBNF, the grammar format of llama.cpp, translated to the library's Lark.

A GBNF grammar describes characters. A Lark grammar has terminals, which the library's lexer matches greedily, and rules. So each
character of the source becomes a terminal of its own, and no lexer can read past the place where a rule would have ended. A grammar
without recursion is one terminal instead: a regular expression, which is read without a parser.

Source: llama.cpp, grammars/README.md (syntax and meaning). References to tokens (`<think>`, `<[1000]>`) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from ridgeline.core.errors import BadGrammar

MAX_REPEATS = 2000
"""Largest number in a repetition, as in llama.cpp."""
_DEEPEST = 100
"""Levels of parentheses."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_REPEATS = re.compile(r"\{\s*(\d{1,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_LOOKS_LIKE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)


def looks_like_gbnf(source: str) -> bool:
    """Whether a grammar is GBNF and not Lark: rules are defined with `::=`."""
    return _LOOKS_LIKE.search(source) is not None


def gbnf_to_lark(source: str) -> str:
    """The grammar in Lark. Raises BadGrammar with line and column."""
    try:
        return _Translator(_Reader(source).read()).lark()
    except RecursionError:
        raise BadGrammar("The grammar repeats repetitions too often: remove some of * + ? { } in a row.") from None


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class _Characters:
    """One character of a class, as the text of a regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Item
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives, each a sequence of items."""

    alternatives: list[list[_Item]]


_Item = _Reference | _Characters | _Repeat | _Group


@dataclass(slots=True)
class _Grammar:
    rules: dict[str, _Group] = field(default_factory=dict)
    fail: Callable[[int, str], BadGrammar] = lambda at, cause: BadGrammar(cause)


class _Reader:
    """Reads the source from `at` on."""

    def __init__(self, source: str) -> None:
        self._source, self._at, self._depth = source, 0, 0

    def read(self) -> _Grammar:
        grammar = _Grammar(fail=self._fail)
        references: list[_Reference] = []
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._source):
            start, name = self._at, self._name('a rule, as in root ::= "a"')
            self._skip(_SPACE)
            if not self._source.startswith("::=", self._at):
                raise self._fail(self._at, f"::= must follow the name {name}")
            if name in grammar.rules:
                raise self._fail(start, f"the rule {name} is defined twice: remove one definition")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            grammar.rules[name] = self._alternatives(nested=False)
            references += _references(grammar.rules[name])
            self._skip(_SPACE)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                raise self._fail(self._at, f"{self._source[self._at]!r} is not expected here")
            self._skip(_SPACE_AND_LINES)
        if "root" not in grammar.rules:
            raise BadGrammar("The grammar has no rule named root: name the first rule so.")
        for reference in references:
            if reference.name not in grammar.rules:
                raise self._fail(reference.at, f"the rule {reference.name} is not defined: define it")
        return grammar

    def _fail(self, at: int, cause: str) -> BadGrammar:
        line = self._source.count("\n", 0, at) + 1
        column = at - self._source.rfind("\n", 0, at)
        return BadGrammar(f"The grammar is not valid in line {line}, column {column}: {cause}.")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._source, self._at)
        self._at = match.end() if match else self._at

    def _name(self, expected: str) -> str:
        match = _NAME.match(self._source, self._at)
        if match is None:
            raise self._fail(self._at, f"expected {expected}, not {self._source[self._at]!r}")
        self._at = match.end()
        return match[0]

    def _alternatives(self, *, nested: bool) -> _Group:
        """Inside of parentheses a line may end anywhere; outside, before and after `|`."""
        alternatives = [self._sequence(nested)]
        while True:
            before = self._at
            self._skip(_SPACE_AND_LINES)
            if not self._source.startswith("|", self._at):
                self._at = before
                return _Group(alternatives)
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            alternatives.append(self._sequence(nested))

    def _sequence(self, nested: bool) -> list[_Item]:
        items: list[_Item] = []
        while self._at < len(self._source):
            start, letter = self._at, self._source[self._at]
            if letter == '"':
                items.append(_Group([self._literal()]))
            elif letter == "[":
                items.append(self._class())
            elif letter == ".":
                self._at += 1
                items.append(_Characters(r"(?s:.)"))
            elif letter == "(":
                items.append(self._parentheses())
            elif letter in "*+?{":
                if not items:
                    raise self._fail(start, f"{letter} repeats nothing: put an item before it")
                items[-1] = self._repeat(items[-1])
            elif letter in "<!":
                raise self._fail(start, "references to tokens are not supported: write their text as a string")
            elif _NAME.match(letter):
                items.append(_Reference(self._name(""), start))
            else:
                break
            self._skip(_SPACE_AND_LINES if nested else _SPACE)
        return items

    def _parentheses(self) -> _Group:
        start = self._at
        self._at += 1
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._fail(start, f"parentheses are nested more than {_DEEPEST} times: move parts to rules")
        self._skip(_SPACE_AND_LINES)
        group = self._alternatives(nested=True)
        self._skip(_SPACE_AND_LINES)
        if not self._source.startswith(")", self._at):
            raise self._fail(start, "this ( has no )")
        self._depth -= 1
        self._at += 1
        return group

    def _literal(self) -> list[_Item]:
        start = self._at
        self._at += 1
        letters: list[_Item] = []
        while not self._source.startswith('"', self._at):
            if self._at >= len(self._source) or self._source[self._at] in "\r\n":
                raise self._fail(start, 'this " begins a string that does not end in its line')
            letters.append(_Characters(_quoted(self._letter())))
        self._at += 1
        return letters

    def _class(self) -> _Characters:
        start = self._at
        self._at += 1
        inverted = self._source.startswith("^", self._at)
        self._at += inverted
        parts: list[str] = []
        while not self._source.startswith("]", self._at):
            if self._at >= len(self._source):
                raise self._fail(start, "this [ has no ]")
            begin, low = self._at, self._letter()
            high = low
            if self._source.startswith("-", self._at) and not self._source.startswith("-]", self._at):
                self._at += 1
                if self._at >= len(self._source):
                    raise self._fail(start, "this [ has no ]")
                high = self._letter()
            if high < low:
                raise self._fail(begin, "this range ends before it begins: exchange its ends")
            parts.append(_quoted(low) + (f"-{_quoted(high)}" if high != low else ""))
        self._at += 1
        if not parts:
            raise self._fail(start, "this [] holds no character" + (": write . for any" if inverted else ""))
        return _Characters(f"[{'^' * inverted}{''.join(parts)}]")

    def _letter(self) -> str:
        """The next character of a string or class, with escapes resolved."""
        start = self._at
        if self._source[start] != "\\":
            self._at += 1
            return self._source[start]
        match = _ESCAPE.match(self._source, start)
        code = next(filter(None, match.groups()[:3]), None) if match else None
        if match is not None and (code is not None or match[4] in _SIMPLE):
            self._at = match.end()
            number = ord(_SIMPLE[match[4]]) if code is None else int(code, 16)
            if number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF:
                return chr(number)
        raise self._fail(start, r"this escape is unknown: use \n, \r, \t, \\, \", \[, \], \xHH, \uHHHH or \UHHHHHHHH")

    def _repeat(self, item: _Item) -> _Repeat:
        start, letter = self._at, self._source[self._at]
        if letter != "{":
            self._at += 1
            return _Repeat(item, int(letter == "+"), 1 if letter == "?" else None)
        match = _REPEATS.match(self._source, start)
        if match is None:
            raise self._fail(start, "a repetition is {n}, {n,} or {n,m}")
        self._at = match.end()
        low = int(match[1])
        high = int(match[3]) if match[3] else None if match[2] else low
        if max(low, high or 0) > MAX_REPEATS:
            raise self._fail(start, f"a repetition has at most {MAX_REPEATS} items")
        if high is not None and high < low:
            raise self._fail(start, f"this repetition ends at {high}, below {low}: exchange them")
        return _Repeat(item, low, high)


class _Translator:
    def __init__(self, grammar: _Grammar) -> None:
        self._rules = grammar.rules
        self._numbers = {name: number for number, name in enumerate(grammar.rules)}
        self._prefix = "r" if self._recursive() else "R"

    def lark(self) -> str:
        lines = [f"{self._name(name)}: {self._group(rule)}" for name, rule in self._rules.items()]
        return "\n".join((f"start: {self._name('root')}", *lines, ""))

    def _name(self, name: str) -> str:
        return f"{self._prefix}{self._numbers[name]}"

    def _recursive(self) -> bool:
        """Whether a rule contains itself, through others or not."""
        names = {name: {reference.name for reference in _references(rule)} for name, rule in self._rules.items()}
        try:
            TopologicalSorter(names).prepare()
        except CycleError:
            return True
        return False

    def _group(self, group: _Group) -> str:
        return " | ".join(" ".join(map(self._item, items)) or '""' for items in group.alternatives)

    def _item(self, item: _Item) -> str:
        match item:
            case _Reference(name=name):
                return self._name(name)
            case _Characters(pattern=pattern):
                return f"/{pattern}/"
            case _Group():
                return f"({self._group(item)})"
            case _Repeat(item=inner, low=low, high=high):
                if high == 0:
                    return '""'
                return f"({self._item(inner)}){{{low},{'' if high is None else high}}}"


def _quoted(letter: str) -> str:
    """A character in a regular expression, inside and outside of a class."""
    return letter if letter.isascii() and letter.isalnum() else f"\\u{{{ord(letter):X}}}"


def _references(item: _Item) -> Iterator[_Reference]:
    match item:
        case _Reference():
            yield item
        case _Repeat(item=inner):
            yield from _references(inner)
        case _Group(alternatives=alternatives):
            for items in alternatives:
                for inner in items:
                    yield from _references(inner)

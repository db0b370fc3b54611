"""GBNF grammars accept and refuse what they say, and errors name the place."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Sequence

import pytest

from ridgeline.core.errors import BadGrammar
from ridgeline.core.sampling import Grammar
from ridgeline.models.hub import shipped_model
from ridgeline.text.gbnf import gbnf_to_lark, looks_like_gbnf
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.tokenizer import Tokenizer
from tests.text.walk import allowed, outputs

ARITHMETIC = r"""
# sums and products
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*   # left to right
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws     ::= | " " ws
"""
LIST = 'root ::= item+\n\n# one line each\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'
CHESS = r"""
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")*
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""
MOVE = r"(?:[NBKQR][a-h]?[1-8]?x?[a-h][1-8]|(?:[a-h]x)?[a-h][1-8](?:=[NBKQR])?|O-O(?:-O)?)[+#]?"


def is_arithmetic(text: str) -> bool:
    """Lines of `expr = term`; parentheses are removed from the inside out."""
    ws = r"[ \t\n]*"
    atom = rf"(?:[a-z][a-z0-9_]*{ws}|[0-9]+{ws}|@{ws})"
    chain = rf"{atom}(?:[-+*/]{atom})*"
    if "@" in text:
        return False
    while (shorter := re.sub(rf"\({ws}{chain}\)", "@", text)) != text:
        text = shorter
    return re.fullmatch(rf"(?:{chain}={ws}{atom}\n)+", text) is not None


def is_json_object(text: str) -> bool:
    """By Python's reader, which also allows white space in front and other white space than spaces."""
    try:
        return text.startswith("{") and isinstance(json.loads(text), dict)
    except ValueError:
        return False


CASES: list[tuple[str, Callable[[str], bool], Sequence[str], str]] = [
    (ARITHMETIC, is_arithmetic, ["a=1\n", "(x1+2)*3 = 7\ny = (2)\n", "((a))-b/c=d\n", "a==1\n", "()=1\n", "a=1"], "a1+*()= \n"),
    (LIST, lambda text: re.fullmatch(r"(?:- [^\r\n\v\f\x85\u2028\u2029]+\n)+", text) is not None,
     ["- a\n", "- é - ü\n- 😀\n", "-a\n", "- \n", "- a", ""], "- aé\n\r"),
    (CHESS, lambda text: re.fullmatch(rf"1\. {MOVE} {MOVE}\n(?:[1-9][0-9]?\. {MOVE} {MOVE}\n)*", text) is not None,
     ["1. e4 e5\n", "1. Nf3 d5\n2. O-O-O Qxe5+\n", "1. e8=Q# Nbxd2\n", "2. e4 e5\n", "1. e9 e5\n"], "1. e45NxO-=Q+\n"),
    (JSON, is_json_object, ['{}', '{"a": [1, -2.5e+3, true], "é\\n": {"b": null}}', '{"a":"\\u00e9"}', '{"a":01}', '{a:1}', '[1]'],
     '{}[]":,1-e\\ua'),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(shipped_model())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=[end_of(tokenizer)])


def end_of(tokenizer: Tokenizer) -> int:
    assert tokenizer.eos_id is not None
    return tokenizer.eos_id


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the masks lead through the text to its end."""
    state = compiler.compile(Grammar("gbnf", grammar)).start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(state):
            return False
        state.accept([token])
    return state.finished or end_of(tokenizer) in allowed(state)


@pytest.mark.parametrize(("grammar", "oracle", "texts", "letters"), CASES, ids=["arithmetic", "list", "chess", "json"])
def test_a_grammar_accepts_what_it_describes(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: str,
    oracle: Callable[[str], bool],
    texts: Sequence[str],
    letters: str,
) -> None:
    draw, given = random.Random(0), list(texts)
    for text in texts:
        for _ in range(8):
            at, letter = draw.randrange(len(text) + 1), draw.choice(letters)
            given.append(text[:at] + letter + text[at + draw.randrange(2) :])
    verdicts = {text: oracle(text) for text in given}
    assert {accepts(compiler, tokenizer, grammar, text) for text, good in verdicts.items() if good} == {True}
    assert [text for text, good in verdicts.items() if not good and accepts(compiler, tokenizer, grammar, text)] == []
    assert 2 < sum(verdicts.values()) < len(verdicts) - 2


def test_random_answers_fit(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    compiled = compiler.compile(Grammar("gbnf", CHESS))
    for text in outputs(compiled.start, tokenizer, end_of(tokenizer), count=6):
        assert CASES[2][1](text), text


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ('root ::= "x" root "x" | [a-z] "by" | "ab" "c"', {"aby": True, "abc": True, "xabcx": True, "ab": False}),
        ('root ::= root "+" root | [a-z]*  "b"', {"ab": True, "abb+b": True, "a": False, "b+": False}),
        ('root ::= "" | "a"{0} "b"{2,3}', {"": True, "bb": True, "bbbb": False, "ab": False}),
        ("root ::= .{2} | [^a]\n    | [\\]\\-x-]{3}", {"é\n": True, "b": True, "a": False, "]-x": True, "]]y": False}),
        ('root ::= a-b "c"\n\n\na-b ::= (\n  "x" # one\n  | "y"\n)', {"xc": True, "yc": True, "c": False}),
    ],
)
def test_no_rule_reads_what_belongs_to_another(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, texts: dict[str, bool]
) -> None:
    """Among them grammars in which a lexer that reads as far as it can would go wrong."""
    assert {text: accepts(compiler, tokenizer, grammar, text) for text in texts} == texts


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a', 'in line 1, column 10: this " begins a string that does not end in its line.'),
        ('root ::= a\n\nb ::= "b"', "in line 1, column 10: the rule a is not defined: define it."),
        ('b ::= "b"', "The grammar has no rule named root: name the first rule so."),
        ('root ::= "a"\nroot ::= "b"', "in line 2, column 1: the rule root is defined twice"),
        ('root ::= ("a"\n', "in line 1, column 10: this ( has no )."),
        ('root ::= "a" )', "in line 1, column 14: ')' is not expected here."),
        ("root ::=\n  [a-", "in line 2, column 3: this [ has no ]."),
        ("root ::= [z-a]", "in line 1, column 11: this range ends before it begins"),
        (r'root ::= "\q"', r"in line 1, column 11: this escape is unknown: use \n"),
        (r'root ::= "\uD800"', "in line 1, column 11: this escape is unknown"),
        ("root ::= [^]", "in line 1, column 10: this [] holds no character: write . for any."),
        ("root ::= * x", "in line 1, column 10: * repeats nothing: put an item before it."),
        ('root ::= "a"{3,2}', "in line 1, column 13: this repetition ends at 2, below 3"),
        ('root ::= "a"{9999}', "in line 1, column 13: a repetition has at most 2000 items."),
        ('root ::= "a"{x}', "in line 1, column 13: a repetition is {n}, {n,} or {n,m}."),
        ("root ::= <think>", "in line 1, column 10: references to tokens are not supported"),
        ('root "a"', "in line 1, column 6: ::= must follow the name root."),
        ('root ::= "a"\n%x', "in line 2, column 1: expected a rule, as in root ::= \"a\", not '%'."),
        ("root ::= " + "(" * 200, "in line 1, column 110: parentheses are nested more than 100 times"),
        ("root ::= root", "matches nothing: a rule refers only to itself."),
    ],
)
def test_errors_name_line_and_column(compiler: GrammarCompiler, grammar: str, message: str) -> None:
    with pytest.raises(BadGrammar, match=re.escape(message)):
        compiler.compile(Grammar("gbnf", grammar))


def test_gbnf_is_told_from_lark() -> None:
    assert all(map(looks_like_gbnf, (ARITHMETIC, JSON, LIST, CHESS)))
    assert not looks_like_gbnf('start: "a ::= b"\n// x ::= y\n')
    assert gbnf_to_lark('root ::= "a" x?\nx ::= [0-9]') == "start: R0\nR0: (/a/) (R1){0,1}\nR1: /[0-9]/\n"


def test_large_grammars_take_little_time_or_are_refused() -> None:
    began = time.process_time()
    gbnf_to_lark("root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(4000)) + 'r4000 ::= "a"\n')
    assert time.process_time() - began < 1
    with pytest.raises(BadGrammar, match="repeats repetitions too often"):
        gbnf_to_lark('root ::= "a"' + "*" * 5000)

"""The budget tool sees what is too large, and only that."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tools.budgets import (
    ALL_ROW,
    FILE_LINES,
    FILE_STATEMENTS,
    FUNCTION_LINES,
    FUNCTION_STATEMENTS,
    HEART_ROW,
    HEART_STATEMENTS,
    KERNEL_LINES,
    KERNEL_STATEMENTS,
    PARAMETERS,
    ROOT,
    breaches,
    in_heart,
    package_of,
    report,
    sizes,
    sources,
    statements,
    unclassified,
)


def texts(source: str) -> list[str]:
    return [str(breach) for breach in breaches("a.py", source)]


LINE = "    (\n1)\n"
"""A statement of two lines."""


def test_functions_in_lines() -> None:
    assert texts("def f():\n" + LINE * 29 + "    1\n") == []
    assert texts("def f():\n" + LINE * 30) == ["a.py:1: f has 61 lines (at most 60): name a part of it."]
    assert len(texts("class A:\n    async def f(self):\n" + "        (\n1)\n" * 30)) == 1


def test_functions_in_statements() -> None:
    body = "    x = 1; y = 2\n" * (FUNCTION_STATEMENTS // 2)
    assert texts('def f():\n    """Doc."""\n' + body) == []
    more = FUNCTION_STATEMENTS + 1
    assert texts("def f():\n" + body + "    if x: pass\n") == [
        f"a.py:1: f has {more + 1} statements (at most {FUNCTION_STATEMENTS}): name a part of it."
    ]
    assert len(texts("def f():\n    def g():\n" + "    " + body.replace("\n    ", "\n        "))) == 1, "g counts in f"


@pytest.mark.parametrize("decorator", ["@triton.jit", "@triton.jit(debug=True)", "@jit"])
def test_kernels_may_be_longer_and_take_more(decorator: str) -> None:
    head = f"{decorator}\ndef f(a, b, c, d, e, f, g, h):\n"
    assert texts(head + LINE * 74 + "    1\n") == []
    assert len(texts(head + LINE * 75)) == 1
    assert texts(head + "    1\n" * KERNEL_STATEMENTS) == []
    assert "statements" in texts(head + "    1\n" * (KERNEL_STATEMENTS + 1))[0]


def test_files() -> None:
    assert texts("(\n1)\n" * 250) == []
    assert "a.py:501: file has 501 lines" in texts("(\n1)\n" * 250 + "1\n")[0]
    assert texts("x = 1\n" * FILE_STATEMENTS) == []
    assert (
        f"a.py:1: file has {FILE_STATEMENTS + 1} statements"
        in texts("x = 1; y = 2\n" + "x = 1\n" * (FILE_STATEMENTS - 1))[0]
    )


@pytest.mark.parametrize(
    ("signature", "fine"),
    [
        ("a, b, c, d, e, f", True),
        ("self, a, b, c, d, e, f", True),
        ("a, b, c, d, e, f, g", False),
        ("a, b, /, c, *d, e, f, **g", False),
        ("cls, *, a, b, c, d, e, f, g", False),
    ],
)
def test_parameters(signature: str, fine: bool) -> None:
    assert (texts(f"def f({signature}): pass\n") == []) is fine


def test_a_test_takes_as_many_cases_as_it_likes() -> None:
    assert texts("def test_f(a, b, c, d, e, f, g): pass\n") == []


def test_statements_leave_out_prose_and_layout() -> None:
    source = '"""Doc.\n\nMore."""\n\n# comment\nx = 1\n"""Of x."""\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert statements(ast.parse(source)) == 3
    assert statements(ast.parse("f(\n    1,\n    2,\n)\n")) == statements(ast.parse("f(1, 2)")) == 1
    assert statements(ast.parse("if a: b = 1; c = 2\nelse: d = 3")) == 4


def test_packages() -> None:
    assert package_of("src/ridgeline/kv/blocks.py") == "kv" and package_of("src/ridgeline/llm.py") == "."
    assert package_of("src/ridgeline/ops/triton/walk.py") == "ops"


def test_the_heart_takes_packages_and_named_files() -> None:
    files = {
        "src/ridgeline/kv/blocks.py": "x = 1\n",
        "src/ridgeline/ops/table.py": "x = 1\ny = 2\n",
        "src/ridgeline/ops/reference.py": "x = 1\n",
        "tests/kv/test_blocks.py": "x = 1\n",
    }
    assert sizes(files) == {"kv": 1, "ops": 3, ALL_ROW: 4, HEART_ROW: 3}
    assert not in_heart("src/ridgeline/core/resolve.py") and in_heart("src/ridgeline/core/plan.py")
    assert report(Counter(kv=3, all=4, heart=2), Counter(kv=1, all=1, heart=1)).splitlines()[1:3] == [
        "kv              3      +2",
        "all             4      +3",
    ]


def test_each_file_of_ops_and_core_is_of_the_heart_or_beside_it() -> None:
    files = list(sources(ROOT))
    assert unclassified(files) == []
    assert [breach.path for breach in unclassified([*files, "src/ridgeline/ops/new.py"])] == [
        "src/ridgeline/ops/new.py"
    ]
    assert "names no file" in str(unclassified([path for path in files if not path.endswith("core/plan.py")])[0])


def test_the_documentation_has_the_limits() -> None:
    text = " ".join((ROOT / "docs/architecture.md").read_text().split())
    limits = (
        f"at most {HEART_STATEMENTS:,} statements",
        f"at most {FUNCTION_STATEMENTS} statements and {FUNCTION_LINES} lines (a kernel {KERNEL_STATEMENTS} and {KERNEL_LINES})",
        f"a file {FILE_STATEMENTS} statements and {FILE_LINES} lines, and a function at most {PARAMETERS} parameters",
    )
    assert [limit for limit in limits if limit not in text] == []

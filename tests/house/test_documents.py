"""The documents can be found: README is short, the index of docs/ lists every page, and links lead to files and headings."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "training/README.md") + tuple(
    str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))
)
LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)")
ENTRY = re.compile(r"^- \[[^\]]+\]\(([\w-]+\.md)\): \S.*\.$", re.M)
LONGEST_README = 120


def text_of(page: Path) -> str:
    """A page without its code, where brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, by GitHub's rule: lower case, without punctuation, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def broken(page: Path) -> list[str]:
    """Links of a page to files or headings that do not exist. Addresses of other sites are not followed."""
    wrong = []
    for path, anchor in LINK.findall(text_of(page)):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{path}#{anchor}" if anchor else path)
    return wrong


def unlisted(index: str, folder: Path) -> list[str]:
    """Pages of a folder that its index does not list, or lists more than once, with a sentence of one line."""
    listed = Counter(ENTRY.findall(index))
    return [path.name for path in sorted(folder.glob("*.md")) if path.name != "README.md" and listed[path.name] != 1]


def test_the_index_lists_every_page() -> None:
    assert unlisted((ROOT / "docs/README.md").read_text(encoding="utf-8"), ROOT / "docs") == []


def test_a_page_that_is_not_listed_is_seen(tmp_path: Path) -> None:
    for name in ("README.md", "a.md", "b.md", "c.md"):
        (tmp_path / name).touch()
    assert unlisted("- [A](a.md): of a.\n- [B](b.md): without a stop\n", tmp_path) == ["b.md", "c.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken(ROOT / page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A `title`, with [link](x.md)\n")
    page.write_text(
        "[a](other.md#a-title-with-link) [b](other.md#b) [c](gone.md) [d](#e) `[f](g)` [h](https://x.org)\n"
    )
    assert broken(page) == ["other.md#b", "gone.md", "#e"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_README

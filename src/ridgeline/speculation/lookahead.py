"""Lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"): the target
drafts for itself, without a second model and without reference text.

Two parts share one draft tree. The *window* guesses `columns` future tokens and refines them by Jacobi iteration: each step
replaces a guess by the token that the target draws after it. A column keeps its last `ngram - 1` guesses, its levels. These and the
token drawn after the last of them are an n-gram that the target would generate. The *pool* stores n-grams by their first token.
Those that begin with the last known token are the candidates, which the same step verifies.

The mask of the paper (figure 2b) is the mask of a tree: the oldest level of all columns is a chain after the last known token, the
further levels of a column are a chain after its node in that chain, and candidates are children of the last known token. The
position of a node is its depth. Equal children of a node are merged.

A step moves the window by one place, even if it gained more tokens. Then the guesses are too far ahead, which the target corrects
within a step. Starting new columns instead was measured and gains no more.

With sampling the iteration has a fixed point as well, because the draw at a position depends only on the seed and the tokens before
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.errors import ConfigError

COLUMNS = 1
NGRAM = 3
CANDIDATES = 3
"""Defaults of the paper's W, N and G for a device where a query token costs a few per cent of a step. Where it costs almost
nothing,
larger values pay: 8, 5 and 8 gained a third more tokens per step with greedy answers of the shipped model, a seventh with sampled
answers, for eight to nine times the nodes."""
POOL_KEYS = 8192
"""Most first tokens in the pool. The oldest one is evicted first."""
SEEDED = 4096
"""Number of last prompt tokens whose n-grams enter the pool, at 0.5 us each."""


class Lookahead:
    """The drafter.

    Args:
        columns: guessed future tokens (the paper's W). 0: only the pool, filled from the text.
        ngram: tokens of an n-gram (N).
        candidates: n-grams kept for a first token and verified in one step (G).

    A draft has at most (columns + candidates) * (ngram - 1) nodes, the candidates first. Raises ConfigError for invalid sizes.
    """

    def __init__(self, columns: int = COLUMNS, ngram: int = NGRAM, candidates: int = CANDIDATES) -> None:
        if columns < 0 or ngram < 2 or candidates < 1:
            raise ConfigError(
                "Lookahead needs n-grams of at least 2 tokens, at least 1 candidate and 0 or more columns."
            )
        self._columns = columns
        self._ngram = ngram
        self._candidates = candidates
        self.needs_repeat = False

    def start(self, tokens: Sequence[int]) -> Window:
        return Window(tokens, self._columns, Pool(self._ngram, self._candidates))


class Pool:
    """Most recent n-grams by their first token."""

    __slots__ = ("_grams", "_most", "ngram")

    def __init__(self, ngram: int, most: int) -> None:
        self.ngram = ngram
        self._most = most
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """Add every n-gram of a text."""
        for gram in zip(*(tokens[start:] for start in range(self.ngram)), strict=False):
            self.add(gram)

    def add(self, gram: tuple[int, ...]) -> None:
        first, continuation = gram[0], gram[1:]
        continuations = self._grams.get(first)
        if continuations is None:
            if len(self._grams) >= POOL_KEYS:
                del self._grams[next(iter(self._grams))]
            self._grams[first] = {continuation: None}
            return
        if continuation in continuations:
            del continuations[continuation]
        elif len(continuations) >= self._most:
            del continuations[next(iter(continuations))]
        continuations[continuation] = None

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of `token` (ngram - 1 tokens each), the most recent first."""
        return list(reversed(self._grams.get(token, ())))

    def __len__(self) -> int:
        return sum(map(len, self._grams.values()))


class Window:
    """One request: its columns, oldest level first, and its pool. Implements `Proposer`."""

    def __init__(self, tokens: Sequence[int], columns: int, pool: Pool) -> None:
        self._pool = pool
        pool.read(tokens[-SEEDED:])
        self._recent = list(tokens[-pool.ngram :])
        self._columns = [[token] for token in _spread(tokens, columns)]
        self._ends: list[int] = []
        """By column: node of its last level in the last proposed draft."""
        self._proposed = EMPTY_DRAFT

    def propose(self, nodes: int, depth: int) -> Draft:
        tree = _Tree(nodes, depth)
        for gram in self._pool.behind(self._recent[-1]):
            tree.add_path(-1, 0, gram)
        self._ends = []
        chain = -1
        for above, column in enumerate(self._columns):
            end = tree.add_path(chain, above, column)
            if end is None:
                break
            self._ends.append(end)
            chain = tree.child[chain, column[0]]
        self._proposed = tree.draft()
        return self._proposed

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        recent, ngram = self._recent, self._pool.ngram
        recent.extend(tokens)
        self._pool.read(recent[-len(tokens) - ngram + 1 :])
        del recent[:-ngram]
        count = len(draft.tokens)
        if draft == self._proposed.first(count):
            for column, end in zip(self._columns, self._ends, strict=False):
                if end < count:
                    column.append(drawn[end + 1])
                    if len(column) == ngram:
                        self._pool.add(tuple(column))
                        del column[0]
        self._proposed = EMPTY_DRAFT
        self._ends = []


class _Tree:
    """A draft tree built from paths. Existing nodes are reused."""

    __slots__ = ("_depth", "_nodes", "_parents", "_tokens", "child")

    def __init__(self, nodes: int, depth: int) -> None:
        self._nodes = nodes
        self._depth = depth
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self.child: dict[tuple[int, int], int] = {}
        """(parent, token) -> node."""

    def add_path(self, node: int, above: int, path: Sequence[int]) -> int | None:
        """Add a path after `node`, which has depth `above`, as far as it fits. Returns the last node; None if a part did not
        fit."""
        for token in path[: self._depth - above]:
            child = self.child.get((node, token))
            if child is None:
                child = len(self._tokens)
                if child == self._nodes:
                    return None
                self.child[node, token] = child
                self._tokens.append(token)
                self._parents.append(node)
            node = child
        return node if above + len(path) <= self._depth else None

    def draft(self) -> Draft:
        return Draft.of(self._tokens, self._parents)


def _spread(tokens: Sequence[int], count: int) -> list[int]:
    """First guesses: tokens of the prompt at even distances. Their choice is arbitrary."""
    return [tokens[place * len(tokens) // count] for place in range(count)]

"""Lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"): the target
drafts for itself, with no second model and no text to copy from.

Two parts share one draft tree. The *window* guesses `columns` tokens ahead and refines them by Jacobi iteration: each step
replaces a guess by what the target says behind it. A column keeps its last `ngram - 1` guesses, its levels; with the target's
word behind the last of them they are an n-gram that the target would say. The *pool* collects n-grams by their first token;
those that begin with the last known token are the candidates, verified in the same step.

The mask of the paper (figure 2b) is the mask of a tree: the oldest level of all columns is a chain behind the last known token,
a column's further levels are a chain behind its own node of that, and candidates hang on the last known token. Position is
depth. Equal tokens behind one node are one node.

A step moves the window by one place, also if it gained more tokens: the guesses then stand further ahead than they were said
to, which the target mends within a step. Dropping them instead, and beginning new columns, was measured and gains no more.

Sampling has a fixed point as well: the draw at a position is a function of the seed and of the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.errors import ConfigError

COLUMNS = 1
NGRAM = 3
CANDIDATES = 3
"""For a device where each query token costs a few per cent of a step. Where it costs next to nothing more pays: 8, 5 and 8
gained a third more tokens a step with the shipped model's greedy answers, a seventh with sampled ones, for eight to nine
times the nodes."""
POOL_KEYS = 8192
"""First tokens the pool knows at most; the one it has known longest is forgotten first."""
SEEDED = 4096
"""Tokens of a prompt whose n-grams enter the pool, counted from its end: 0.5 us each."""


class Lookahead:
    """The drafter. columns: guesses ahead (the paper's W); with none there is only the pool of what was said. ngram: tokens of
    an n-gram (N). candidates: n-grams that are kept for a first token, and verified at once (G). A draft has at most
    (columns + candidates) * (ngram - 1) nodes, the candidates first. Raises ConfigError for sizes that make no draft."""

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
    """n-grams by their first token, of each first token the most recent ones."""

    __slots__ = ("_grams", "_most", "ngram")

    def __init__(self, ngram: int, most: int) -> None:
        self.ngram = ngram
        self._most = most
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """Take every n-gram of a text."""
        for gram in zip(*(tokens[start:] for start in range(self.ngram)), strict=False):
            self.add(gram)

    def add(self, gram: tuple[int, ...]) -> None:
        first, rest = gram[0], gram[1:]
        known = self._grams.get(first)
        if known is None:
            if len(self._grams) >= POOL_KEYS:
                del self._grams[next(iter(self._grams))]
            self._grams[first] = {rest: None}
            return
        if rest in known:
            del known[rest]
        elif len(known) >= self._most:
            del known[next(iter(known))]
        known[rest] = None

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """What may follow `token`, ngram - 1 tokens each, the most recent first."""
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
        """By column: the node of its last level in the draft proposed last."""
        self._proposed = EMPTY_DRAFT

    def propose(self, nodes: int, depth: int) -> Draft:
        tree = _Tree(nodes, depth)
        for gram in self._pool.behind(self._recent[-1]):
            tree.hang(-1, 0, gram)
        self._ends = []
        chain = -1
        for above, column in enumerate(self._columns):
            end = tree.hang(chain, above, column)
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
    """A draft that grows by paths; what it already has is not added again."""

    __slots__ = ("_depth", "_nodes", "_parents", "_tokens", "child")

    def __init__(self, nodes: int, depth: int) -> None:
        self._nodes = nodes
        self._depth = depth
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self.child: dict[tuple[int, int], int] = {}
        """(parent, token) -> node."""

    def hang(self, node: int, above: int, path: Sequence[int]) -> int | None:
        """Add what fits of a path behind `node`, which is `above` levels deep. The last node; None if not all of it fits."""
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
    """First guesses: tokens of the prompt at even distances, as good as any."""
    return [tokens[place * len(tokens) // count] for place in range(count)]

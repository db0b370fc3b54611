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

The sizes follow the load. A draft of n nodes holds as many candidates and whole columns as fit, in the proportion of the largest
sizes. Of the largest draft and its halvings, a request verifies the one with the highest measured rate (see Ladder).

With sampling the iteration has a fixed point as well, because the draw at a position depends only on the seed and the tokens before
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.core.draft import EMPTY_DRAFT, MAX_DRAFT, Draft
from ridgeline.core.errors import ConfigError

POOL_KEYS = 8192
"""Most first tokens in the pool. The oldest one is evicted first."""
SEEDED = 4096
"""Number of last prompt tokens whose n-grams enter the pool, at 0.5 us each."""
_HOLD, _PROBES, _WEIGHT, _HOPE = 32, 8, 0.05, 1.25
"""Drafts of a request between two choices of a size; choices between two probes of another size; weight of a draft in the mean gain
of its size; gain expected of twice the nodes before any draft of that size."""


class DraftShape(NamedTuple):
    """Sizes of a draft: guessed future tokens (the paper's W), tokens of an n-gram (N), and n-grams verified in a step (G)."""

    columns: int = 7
    ngram: int = 3
    candidates: int = 7

    @property
    def nodes(self) -> int:
        """Most nodes of a draft."""
        return (self.columns + self.candidates) * (self.ngram - 1)

    def within(self, nodes: int) -> DraftShape:
        """The sizes of a draft of at most `nodes` nodes: columns and candidates in the same proportion, at least one candidate."""
        paths = min(nodes // (self.ngram - 1), self.columns + self.candidates)
        columns = paths * self.columns // (self.columns + self.candidates)
        return DraftShape(columns, self.ngram, max(1, paths - columns))


SHAPE = DraftShape()


def read_shape(text: str) -> DraftShape:
    """The shape that a text gives, such as "w=7,n=5,g=7"; a size that it leaves out has its default. Raises ConfigError."""
    letters = {"w": "columns", "n": "ngram", "g": "candidates"}
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        letter, _, number = part.strip().lower().partition("=")
        if letter not in letters or not number.isdecimal() or letters[letter] in sizes:
            raise ConfigError(
                f"--speculate lookahead: {part!r} is not one of w=, n= and g= with a whole number, each at most once: write for "
                "example lookahead:w=7,n=5,g=7.",
                param="speculate",
            )
        sizes[letters[letter]] = int(number)
    return checked(SHAPE._replace(**sizes))


def checked(shape: DraftShape) -> DraftShape:
    """The shape. Raises ConfigError if no draft has it."""
    columns, ngram, candidates = shape
    if columns < 0 or ngram < 2 or candidates < 1:
        raise ConfigError(
            f"Lookahead needs n-grams of at least 2 tokens, at least 1 candidate and 0 or more columns; w={columns}, n={ngram}, "
            f"g={candidates} was asked for.",
            param="speculate",
        )
    if shape.nodes > MAX_DRAFT:
        fits = MAX_DRAFT // (ngram - 1)
        raise ConfigError(
            f"Lookahead with w={columns}, n={ngram}, g={candidates} verifies (w + g)(n - 1) = {shape.nodes} tokens in a step, and "
            f"a draft has at most {MAX_DRAFT}: "
            + (f"with n={ngram}, w + g may be up to {fits}." if fits > 1 else "use a smaller n."),
            param="speculate",
        )
    return shape


class Ladder:
    """Sizes of drafts in nodes, each twice the one before, and the tokens that they gained; shared by all requests.

    The rate of n nodes, with mean gain g and a cost c of a node in undrafted steps, is (1 + g) / (1 + c n). The size with the
    highest rate is chosen; now and then one beside it.
    """

    def __init__(self, largest: int, smallest: int) -> None:
        count = max(1, (largest // max(1, smallest)).bit_length())
        self.nodes = [largest >> step for step in reversed(range(count))]
        self._gains: dict[int, float] = {}
        """Mean gain by place in `nodes`."""
        self._choices = 0

    def choose(self, cost: float) -> int:
        """The place of the size for the next drafts of a request. cost: of a node, in undrafted steps."""
        last = len(self.nodes) - 1
        if cost <= 0:
            return last
        rates = [(1 + self._gain(place)) / (1 + cost * nodes) for place, nodes in enumerate(self.nodes)]
        best = rates.index(max(rates))
        self._choices += 1
        if self._choices % _PROBES == 0:
            best += 1 if self._choices // _PROBES % 2 else -1
        return min(max(best, 0), last)

    def _gain(self, place: int) -> float:
        """The mean gain of a size; without a draft of it, what the nearest size lets hope for."""
        near = min(self._gains, key=lambda known: abs(known - place), default=None)
        return _HOPE**place if near is None else self._gains[near] * _HOPE ** (place - near)

    def observe(self, place: int, gained: int) -> None:
        """A draft of the size at `place` gained tokens."""
        before = self._gains.get(place, float(gained))
        self._gains[place] = before + _WEIGHT * (gained - before)


class Lookahead:
    """The drafter. shape: of the largest draft. Raises ConfigError for a shape that no draft has."""

    def __init__(self, shape: DraftShape = SHAPE) -> None:
        self._shape = checked(shape)
        self._ladder = Ladder(shape.nodes, 2 * (shape.ngram - 1))
        self.needs_repeat = False

    def start(self, tokens: Sequence[int]) -> Window:
        return Window(tokens, self._shape, self._ladder)


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

    def __init__(self, tokens: Sequence[int], shape: DraftShape, ladder: Ladder) -> None:
        self._shape = shape
        self._ladder = ladder
        self._place = self._hold = 0
        """Place in the ladder of the size in use, for `_hold` more drafts."""
        self.pool = Pool(shape.ngram, shape.candidates)
        self.pool.read(tokens[-SEEDED:])
        self._recent = list(tokens[-shape.ngram :])
        self._columns = [[token] for token in _spread(tokens, shape.columns)]
        self._ends: list[int] = []
        """By column: node of its last level in the last proposed draft."""
        self._proposed = EMPTY_DRAFT

    def nodes(self, chain: int, cost: float) -> int:
        if not self._hold:
            self._place, self._hold = self._ladder.choose(cost), _HOLD
        return self._ladder.nodes[self._place]

    def propose(self, nodes: int, depth: int) -> Draft:
        tree, shape = _Tree(nodes, depth), self._shape.within(nodes)
        for gram in self.pool.behind(self._recent[-1])[: shape.candidates]:
            tree.add_path(-1, 0, gram)
        self._ends = []
        chain = -1
        for above, column in enumerate(self._columns[: max(shape.columns, tree.room // (shape.ngram - 1))]):
            end = tree.add_path(chain, above, column)
            if end is None:
                break
            self._ends.append(end)
            chain = tree.child[chain, column[0]]
        self._proposed = tree.draft()
        return self._proposed

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        recent, ngram = self._recent, self.pool.ngram
        recent.extend(tokens)
        self.pool.read(recent[-len(tokens) - ngram + 1 :])
        del recent[:-ngram]
        count = len(draft.tokens)
        if count and draft == self._proposed.first(count):
            if self._hold:
                self._hold -= 1
                self._ladder.observe(self._place, len(tokens) - 1)
            for column, end in zip(self._columns, self._ends, strict=False):
                if end < count:
                    column.append(drawn[end + 1])
                    if len(column) == ngram:
                        self.pool.add(tuple(column))
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

    @property
    def room(self) -> int:
        """Nodes that may still be added."""
        return self._nodes - len(self._tokens)

    def draft(self) -> Draft:
        return Draft.of(self._tokens, self._parents)


def _spread(tokens: Sequence[int], count: int) -> list[int]:
    """First guesses: tokens of the prompt at even distances. Their choice is arbitrary."""
    return [tokens[place * len(tokens) // count] for place in range(count)]

"""Inference with reference: guesses copied from what was said before (Yang et al. 2023, "Inference with Reference: Lossless
Acceleration of Large Language Models", section 3; with the prompt alone it is known as prompt lookup decoding).

The longest end of the tokens so far that was said earlier (in the prompt, in the output or in a document) is looked up, and
what followed there is the guess. Several places give a tree. Two kinds of match:

- *Exact*: the last n tokens stand at the place too, n >= ANCHOR.
- *Within one edit*: at least EDIT_BEFORE equal tokens, then one edit, then equal tokens up to the end. The edit is a token
  that was replaced, put in (the place lacks it) or left out (only the place has it), and lies within the last EDIT_BEHIND
  tokens. So a copy goes on right behind a change, where an exact match has to wait for ANCHOR tokens.

Every node has a chance: the product, along its path, of how often the next token of such a match was right. It starts from
what was measured on held-out text (benchmarks/drafters.py) and learns from each verified draft of the request, so that a
request that copies is trusted sooner than one whose matches are chance. Nodes below a least chance are not drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter

from ridgeline.core.draft import EMPTY_DRAFT, Draft

ANCHOR = 2
"""Tokens that must be equal before a place is looked at."""
LONGEST = 16
"""Equal tokens that are counted; a longer match is no surer."""
SURE = 6
"""From this length on an exact match is followed alone, without a look for edits."""
EDIT_BEFORE = 3
EDIT_BEHIND = 3
RESUMED = LONGEST + 1
"""Grade of a match that ends with its edit; RESUMED + 1 is that of one with equal tokens behind it. Below, a grade is the
length of an exact match."""
PLACES = 8
"""Most recent places that are looked at for one anchor."""
BRANCHES = 6
REACH = 32_768
"""Tokens of a prompt that are indexed, counted from its end: 200 bytes and 0.3 us each."""
MIN_CHANCE = 0.1
"""Of a node that is drafted: about what a query token costs in steps, times the tokens that a step gains."""

_MEASURED = (
    0.00, 0.00, 0.44, 0.52, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.82, 0.84, 0.86, 0.87, 0.88, 0.89, 0.95, 0.12, 0.75,
)  # fmt: skip
"""By grade: how often the next token of a match was right, on held-out text."""
_WEIGHT = 8.0
"""Tries for which the measured chance counts."""


class Text:
    """Tokens that are searched. A place is the number of tokens before it. -1 stands between two documents."""

    __slots__ = ("_earlier", "_latest", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = [0]
        """By place: the one before it with the same ANCHOR tokens in front, 0 for none."""
        self.extend(tokens)

    def extend(self, more: Sequence[int]) -> None:
        tokens, latest, earlier = self.tokens, self._latest, self._earlier
        first = max(len(tokens) + 1, ANCHOR)
        tokens.extend(more)
        earlier.extend([0] * (first - len(earlier)))
        ends = tokens[first - ANCHOR :]
        for place, anchor in enumerate(zip(*(ends[start:] for start in range(ANCHOR)), strict=False), first):
            earlier.append(latest.get(anchor, 0))
            latest[anchor] = place
        del earlier[len(tokens) + 1 :]

    def places(self, anchor: tuple[int, ...]) -> Iterator[int]:
        """Places behind these ANCHOR tokens, the most recent first."""
        place = self._latest.get(anchor, 0)
        while place:
            yield place
            place = self._earlier[place]

    def shared(self, place: int, tokens: list[int], end: int) -> int:
        """How many tokens before `place` equal those before `end` of `tokens`, at most LONGEST; ANCHOR are known to."""
        text = self.tokens
        most = min(LONGEST, place, end)
        if text[place - most : place] == tokens[end - most : end]:
            return most
        count = ANCHOR
        while text[place - 1 - count] == tokens[end - 1 - count]:
            count += 1
        return count

    def following(self, place: int, count: int) -> list[int]:
        """At most `count` tokens behind `place`, up to the end of the document. What lies at the end of the text has only
        begun to repeat: it is repeated."""
        copied = self.tokens[place : place + count]
        if -1 in copied:
            return copied[: copied.index(-1)]
        while copied and len(copied) < count:
            copied += copied[: count - len(copied)]
        return copied


_Match = tuple[int, Text, int]
"""Grade, text, and the place in it behind which the guess begins."""


class NGram:
    """The drafter. documents: token ids of texts that answers are likely to quote, searched after the request's own."""

    def __init__(self, documents: Sequence[Sequence[int]] = (), *, min_chance: float = MIN_CHANCE) -> None:
        self._documents = Text()
        for document in documents:
            self._documents.extend((*document, -1))
        self._min_chance = min_chance
        self.needs_repeat = not documents

    def start(self, tokens: Sequence[int]) -> NGramProposer:
        return NGramProposer(tokens, self._documents, self._min_chance)


class NGramProposer:
    """One request: its tokens, and how far matches have been right in it. Implements `Proposer`."""

    def __init__(self, tokens: Sequence[int], documents: Text, min_chance: float) -> None:
        self._request_text = Text(tokens[-REACH:])
        self._texts = (self._request_text, documents) if documents.tokens else (self._request_text,)
        self._min_chance = min_chance
        self._chance = list(_MEASURED)
        self._tried = [_WEIGHT] * len(_MEASURED)
        self._proposed = EMPTY_DRAFT
        self._grades: list[int] = []
        self._source: tuple[Text, int] | None = None
        """Where the last copy would stand now: worth a look, however many more recent places the anchor has."""

    def propose(self, nodes: int, depth: int) -> Draft:
        matches = self._exact()
        if not matches or matches[0][0] < SURE:
            matches = self._edited() + matches
            matches.sort(key=self._trust)
            self._proposed = self._tree(matches[:BRANCHES], nodes, depth)
        else:
            self._proposed = self._chain(matches[0], min(nodes, depth))
        if matches:
            self._source = matches[0][1:]
        return self._proposed

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        self._request_text.extend(tokens)
        if self._source is not None:
            self._source = self._source[0], self._source[1] + len(tokens)
        if draft == self._proposed.first(len(draft.tokens)):
            self._learn(draft, drawn)

    def _trust(self, match: _Match) -> float:
        return -self._chance[match[0]]

    def _exact(self) -> list[_Match]:
        """Longest first, of equal ones the most recent first."""
        tokens = self._request_text.tokens
        end = len(tokens)
        anchor = tuple(tokens[-ANCHOR:])
        matches = [
            (text.shared(place, tokens, end), text, place)
            for text in self._texts
            for place in islice(text.places(anchor), PLACES)
            if place != end or text is not self._request_text
        ]
        if self._source is not None:
            text, place = self._source
            if ANCHOR <= place < len(text.tokens) and tuple(text.tokens[place - ANCHOR : place]) == anchor:
                matches.append((text.shared(place, tokens, end), text, place))
        matches.sort(key=itemgetter(0), reverse=True)
        return matches

    def _edited(self) -> list[_Match]:
        """An anchor 1 .. EDIT_BEHIND tokens before the end, and one edit behind it."""
        tokens = self._request_text.tokens
        matches: list[_Match] = []
        for before in range(len(tokens) - 1, max(EDIT_BEFORE, len(tokens) - EDIT_BEHIND) - 1, -1):
            anchor = tuple(tokens[before - ANCHOR : before])
            for text in self._texts:
                for place in islice(text.places(anchor), PLACES):
                    if place < before or text is not self._request_text:
                        matches.extend(self._behind_edit(text, place, before))
        return matches

    def _behind_edit(self, text: Text, place: int, before: int) -> Iterator[_Match]:
        """Matches whose edit lies between `place` and the tokens from `before` on."""
        tokens = self._request_text.tokens
        new = tokens[before:]
        behind = len(new)
        old = text.tokens[place : place + behind + 1]
        if len(old) <= behind or new[0] == old[0] or -1 in old:
            return
        replaced = new[1:] == old[1:behind]
        put_in = new[1:] == old[: behind - 1]
        left_out = new == old[1:]
        if (replaced or put_in or left_out) and text.shared(place, tokens, before) >= EDIT_BEFORE:
            grade = RESUMED + (behind > 1)
            if left_out:
                yield RESUMED + 1, text, place + behind + 1
            if replaced:
                yield grade, text, place + behind
            if put_in:
                yield grade, text, place + behind - 1

    def _chain(self, match: _Match, most: int) -> Draft:
        """What `_tree` makes of one exact match."""
        grade, text, place = match
        tokens = text.following(place, most)
        grades: list[int] = []
        reached = 1.0
        for _ in tokens:
            reached *= self._chance[grade]
            if reached < self._min_chance:
                break
            grades.append(grade)
            grade = min(grade + 1, LONGEST)
        self._grades = grades
        return Draft(tuple(tokens[: len(grades)]))

    def _tree(self, matches: list[_Match], nodes: int, depth: int) -> Draft:
        """Continuations merged. A node takes its match's chance of what its parent's chance leaves after earlier children."""
        chance, least = self._chance, self._min_chance
        tokens: list[int] = []
        parents: list[int] = []
        grades: list[int] = []
        reached: list[float] = []
        left = [1.0]
        """What a node (the root first) has for further children."""
        children: dict[tuple[int, int], int] = {}
        for match_grade, text, place in matches:
            at, grade = -1, match_grade
            for token in text.following(place, depth):
                child = children.get((at, token))
                if child is None:
                    here = left[at + 1] * chance[grade]
                    if here < least:
                        break
                    left[at + 1] -= here
                    child = children[at, token] = len(tokens)
                    tokens.append(token)
                    parents.append(at)
                    grades.append(grade)
                    reached.append(here)
                    left.append(here)
                at = child
                if grade < LONGEST or grade == RESUMED:
                    grade += 1
        return self._ordered(tokens, parents, grades, reached, nodes)

    def _ordered(
        self, tokens: list[int], parents: list[int], grades: list[int], reached: list[float], nodes: int
    ) -> Draft:
        """The likeliest nodes. No child is likelier than its parent, so a stable order keeps parents before children."""
        order = sorted(range(len(tokens)), key=lambda node: -reached[node])[:nodes]
        place = {-1: -1} | {node: index for index, node in enumerate(order)}
        self._grades = [grades[node] for node in order]
        return Draft.of([tokens[node] for node in order], [place[parents[node]] for node in order])

    def _learn(self, draft: Draft, drawn: Sequence[int]) -> None:
        """Move the chance of each grade that was tried: of the path's nodes, and of the first guess behind each."""
        chance, tried = self._chance, self._tried
        judged = set()
        path = {-1}
        parents = draft.parents or range(-1, len(draft.tokens) - 1)
        for node, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
            if parent in path:
                right = drawn[parent + 1] == token
                if right:
                    path.add(node)
                if parent not in judged:
                    judged.add(parent)
                    grade = self._grades[node]
                    tried[grade] += 1
                    chance[grade] += (right - chance[grade]) / tried[grade]

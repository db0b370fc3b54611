"""N-gram drafter: drafts are copied from earlier text (Yang et al. 2023, "Inference with Reference: Lossless Acceleration of Large
Language Models", section 3; prompt lookup decoding copies only from the prompt).

The drafter searches earlier occurrences of the last tokens in the prompt, the output and a document. The tokens that follow an
occurrence are the draft. Several occurrences give a tree. There are two kinds of match:

- *Exact*: the last n tokens occur at the place, n >= ANCHOR.
- *Within one edit*: at least EDIT_BEFORE equal tokens, then one edit, then equal tokens up to the end. The edit is a replaced,
  inserted (missing at the place) or deleted (only at the place) token within the last EDIT_BEHIND tokens. So copying continues
  directly after an edit, where an exact match first needs ANCHOR equal tokens.

Each node has an estimated acceptance probability: the product, along its path, of the accuracies of the match grades. Accuracies
start from measurements on held-out text (benchmarks/drafters.py) and are updated by each verified draft of the request. Nodes below
a minimum probability are not drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter

from ridgeline.core.draft import EMPTY_DRAFT, Draft

ANCHOR = 2
"""Number of equal tokens that makes a place a candidate."""
LONGEST = 16
"""Most equal tokens that are counted. Longer matches are not more accurate."""
SURE = 6
"""An exact match of at least this length is used without a search for matches within one edit."""
EDIT_BEFORE = 3
EDIT_BEHIND = 3
RESUMED = LONGEST + 1
"""Grade of a match whose last token is the edit; RESUMED + 1: equal tokens follow the edit. Lower grades are the lengths of exact
matches."""
PLACES = 8
"""Number of most recent places that are compared for one anchor."""
BRANCHES = 6
REACH = 32_768
"""Number of last prompt tokens that are indexed, at 200 bytes and 0.3 us each."""
MIN_CHANCE = 0.1
"""Lowest probability of a drafted node: about the cost of a query token in steps, times the tokens that a step gains."""

_MEASURED = (
    0.00, 0.00, 0.44, 0.52, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.82, 0.84, 0.86, 0.87, 0.88, 0.89, 0.95, 0.12, 0.75,
)  # fmt: skip
"""By grade: accuracy of the next token of a match, measured on held-out text."""
_WEIGHT = 8.0
"""Weight of the measured accuracy, in tries."""


class Text:
    """A searchable text. A place is the number of tokens before it. Token -1 separates documents."""

    __slots__ = ("_earlier", "_latest", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = [0]
        """By place: the previous place after the same ANCHOR tokens, 0 for none."""
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
        """Places after these ANCHOR tokens, the most recent first."""
        place = self._latest.get(anchor, 0)
        while place:
            yield place
            place = self._earlier[place]

    def shared(self, place: int, tokens: list[int], end: int) -> int:
        """How many tokens before `place` equal those before `end` of `tokens`, at most LONGEST. The first ANCHOR must be equal."""
        text = self.tokens
        limit = min(LONGEST, place, end)
        if text[place - limit : place] == tokens[end - limit : end]:
            return limit
        count = ANCHOR
        while text[place - 1 - count] == tokens[end - 1 - count]:
            count += 1
        return count

    def following(self, place: int, count: int) -> list[int]:
        """At most `count` tokens after `place`, up to the end of the document. At the end of the text the tokens are repeated
        cyclically: the text has only begun to repeat itself."""
        copied = self.tokens[place : place + count]
        if -1 in copied:
            return copied[: copied.index(-1)]
        while copied and len(copied) < count:
            copied += copied[: count - len(copied)]
        return copied


_Match = tuple[int, Text, int]
"""(grade, text, place in the text at which the draft begins)."""


class NGram:
    """The drafter. documents: token ids of texts that answers may quote, searched after the request's own text. min_chance: see
    MIN_CHANCE."""

    def __init__(self, documents: Sequence[Sequence[int]] = (), *, min_chance: float = MIN_CHANCE) -> None:
        self._documents = Text()
        for document in documents:
            self._documents.extend((*document, -1))
        self._min_chance = min_chance
        self.needs_repeat = not documents

    def start(self, tokens: Sequence[int]) -> NGramProposer:
        return NGramProposer(tokens, self._documents, self._min_chance)


class NGramProposer:
    """State of one request: its tokens and the accuracy of its matches. Implements `Proposer`."""

    def __init__(self, tokens: Sequence[int], documents: Text, min_chance: float) -> None:
        self._request_text = Text(tokens[-REACH:])
        self._texts = (self._request_text, documents) if documents.tokens else (self._request_text,)
        self._min_chance = min_chance
        self._chance = list(_MEASURED)
        self._tried = [_WEIGHT] * len(_MEASURED)
        self._proposed = EMPTY_DRAFT
        self._grades: list[int] = []
        self._source: tuple[Text, int] | None = None
        """Place at which the last copy continues. It is compared even if the anchor has many more recent places."""

    def nodes(self, chain: int, cost: float) -> int:
        return chain

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
        """Exact matches, the longest first; ties: the most recent first."""
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
        """Matches within one edit, with an anchor that ends 1 .. EDIT_BEHIND tokens before the end."""
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
        """The draft of one exact match; equal to `_tree` of it."""
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
        """Merge the continuations of matches. A node gets the accuracy of its match, times the probability that its parent still
        has after earlier children."""
        chance, min_chance = self._chance, self._min_chance
        tokens: list[int] = []
        parents: list[int] = []
        grades: list[int] = []
        probabilities: list[float] = []
        remaining = [1.0]
        """Probability left for further children, by node (the root first)."""
        children: dict[tuple[int, int], int] = {}
        for match_grade, text, place in matches:
            at, grade = -1, match_grade
            for token in text.following(place, depth):
                child = children.get((at, token))
                if child is None:
                    probability = remaining[at + 1] * chance[grade]
                    if probability < min_chance:
                        break
                    remaining[at + 1] -= probability
                    child = children[at, token] = len(tokens)
                    tokens.append(token)
                    parents.append(at)
                    grades.append(grade)
                    probabilities.append(probability)
                    remaining.append(probability)
                at = child
                if grade < LONGEST or grade == RESUMED:
                    grade += 1
        return self._ordered(tokens, parents, grades, probabilities, nodes)

    def _ordered(
        self, tokens: list[int], parents: list[int], grades: list[int], reached: list[float], nodes: int
    ) -> Draft:
        """The most probable nodes. A child is never more probable than its parent, so a stable sort keeps parents before
        children."""
        order = sorted(range(len(tokens)), key=lambda node: -reached[node])[:nodes]
        place = {-1: -1} | {node: index for index, node in enumerate(order)}
        self._grades = [grades[node] for node in order]
        return Draft.of([tokens[node] for node in order], [place[parents[node]] for node in order])

    def _learn(self, draft: Draft, drawn: Sequence[int]) -> None:
        """Update the accuracy of each grade that was tried: of the first child of each accepted node and of the root."""
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

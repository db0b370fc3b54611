"""What a request's next token depends on beside the model: a grammar, and rules that follow from the tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ridgeline.core.draft import Draft
from ridgeline.core.plan import StepPlan
from ridgeline.engine.token_rules import BadWords, DryPenalty, TokenRule
from ridgeline.text.grammar import CompiledGrammar
from ridgeline.wire.messages import Submit


class GrammarPosition(Protocol):
    """The position of an output in its grammar. Implemented by text.grammar.GrammarState."""

    def mask(self) -> bytes: ...

    def masks(self, draft: Draft) -> tuple[Draft, bytes]: ...

    def accept(self, tokens: Sequence[int]) -> None: ...

    @property
    def ready(self) -> bool: ...

    @property
    def finished(self) -> bool: ...


class Rules:
    """Rules without a grammar. See request.Constraint."""

    ready = True
    finished = False

    def __init__(self, rules: Sequence[TokenRule]) -> None:
        self._rules = rules

    def restrict(self, plan: StepPlan, row: int, draft: Draft) -> Draft:
        if biases := self._biases(draft):
            plan.biases[row] = biases
        return draft

    def accept(self, tokens: Sequence[int]) -> None:
        for rule in self._rules:
            for token in tokens:
                rule.push(token)

    def _biases(self, draft: Draft) -> list[tuple[int, int, float]]:
        """As StepPlan.biases."""
        parents = draft.parents or range(-1, len(draft.tokens) - 1)
        biases = [(0, *bias) for rule in self._rules for bias in rule.biases()]
        for rule in self._rules:
            path: list[int] = []
            for node, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
                while path and path[-1] != parent:
                    path.pop()
                    rule.pop()
                path.append(node)
                rule.push(token)
                biases += [(1 + node, *bias) for bias in rule.biases()]
            for _ in path:
                rule.pop()
        return biases


class GrammarAndRules(Rules):
    """A grammar, and rules beside it. See request.Constraint."""

    def __init__(self, grammar: GrammarPosition, rules: Sequence[TokenRule]) -> None:
        super().__init__(rules)
        self._grammar = grammar

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self._grammar.ready

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return self._grammar.finished

    def restrict(self, plan: StepPlan, row: int, draft: Draft) -> Draft:
        draft, plan.masks[row] = self._grammar.masks(draft) if draft.tokens else (draft, self._grammar.mask())
        return super().restrict(plan, row, draft)

    def accept(self, tokens: Sequence[int]) -> None:
        self._grammar.accept(tokens)
        super().accept(tokens)


def start_constraint(message: Submit, compiled: CompiledGrammar | None) -> Rules | None:
    """The constraint of one choice of a request at the start of its output; None if its tokens depend on the model alone."""
    rules: list[TokenRule] = []
    if message.sampling.bad_word_ids:
        rules.append(BadWords(message.sampling.bad_word_ids))
    if message.sampling.dry is not None:
        rules.append(DryPenalty(message.sampling.dry, message.tokens))
    if compiled is not None:
        return GrammarAndRules(compiled.start(), rules)
    return Rules(rules) if rules else None

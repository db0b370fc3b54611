"""The state that all routes share: one immutable value per engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ContextTooLong, ModelNotFound, RequestError
from ridgeline.core.sampling import MAX_STOP_IDS, Pooling
from ridgeline.metrics import Metrics
from ridgeline.service.adapters import NO_ADAPTERS, AdapterBook
from ridgeline.service.answer_cache import AnswerCache
from ridgeline.service.gate import Gate
from ridgeline.service.grammar_checks import GrammarChecks
from ridgeline.service.moderation.watch import Moderation
from ridgeline.service.pin_book import PinBook
from ridgeline.service.shadow import Shadow
from ridgeline.service.yes_no import YesNo
from ridgeline.text.prompts import ChatTemplates
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.client import Client

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""
_SHRINK = 4
"""A normalizer shortens a text at most to a quarter."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model as the API shows it. created: unix seconds.

    defaults: sampling parameters of its generation_config.json, used where a request sets none. adapters: that requests may name
    instead. adapter: name of the adapter whose card this is, "" for the model itself.
    """

    name: str
    root: str
    created: int
    defaults: Mapping[str, float]
    adapters: AdapterBook = NO_ADAPTERS
    adapter: str = ""

    def of(self, name: str | None) -> ModelCard:
        """The card of the adapter with this name; this one if there is none."""
        card = self.adapters.find(name)
        return self if card is None else replace(self, name=card.name, root=card.root, adapter=card.name)

    def names(self, name: str | None) -> tuple[str, ...]:
        """The names that mean the model of a request for `name`."""
        return (self.name, self.root) if self._has(name) else (name or "",)

    def _has(self, name: str | None) -> bool:
        return name in (None, self.name, self.root, self.name + LATEST)

    def check(self, name: str | None) -> None:
        """Raises ModelNotFound for another model's name. A request without a model is accepted."""
        if name is not None and not self._has(name):
            adapters = "".join(f", {card.name!r}" for card in self.adapters)
            raise ModelNotFound(
                f"The model {name[:80]!r} does not exist: this server serves {self.name!r}{adapters}.", param="model"
            )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, from the engine's facts.

    context: tokens of the model's context. kv_tokens: tokens that the KV cache holds for one request. vocab: number of token ids.
    stop_ids: maximum stop token ids of a request.
    """

    context: int
    kv_tokens: int
    vocab: int
    stop_ids: int
    longest_token: int
    """Characters of the longest token."""

    @classmethod
    def of(cls, facts: Mapping[str, Any], tokenizer: Tokenizer) -> Limits:
        context = int(facts["max_len"])
        kv_tokens = int(facts.get("max_request_tokens") or context)
        end_ids = len(facts.get("eos_ids") or ())
        vocab = int(facts.get("vocab_size") or tokenizer.vocab_size)
        longest_token = max(len(tokenizer.token_bytes(index)) for index in range(tokenizer.vocab_size))
        return cls(context, kv_tokens, vocab, MAX_STOP_IDS - end_ids, longest_token)

    @property
    def request_tokens(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return min(self.context, self.kv_tokens)

    def check(self, prompt: int, max_tokens: int | None, field: str) -> None:
        """Raises ContextTooLong for a request that can never run.

        field: the prompt's field. max_tokens: None: as many as fit; 0: the prompt is only scored, which still draws one token.
        """
        answer_tokens = max_tokens or 1
        for limit, subject in (
            (self.context, "the model's context is"),
            (self.kv_tokens, "this server's KV cache holds"),
        ):
            if prompt + answer_tokens > limit:
                answer = str(max_tokens) if max_tokens else "at least 1"
                remedy = "shorten the prompt" if prompt >= limit else "lower max_tokens or shorten the prompt"
                raise ContextTooLong(
                    f"The prompt has {prompt} tokens and the answer may have {answer} more, but {subject} {limit} tokens: "
                    f"{remedy}.",
                    param=field if prompt >= limit else "max_tokens",
                )

    def check_text(self, text: str, field: str) -> None:
        """Raises ContextTooLong for a text that cannot fit the context, however it is tokenized."""
        if len(text) > self.context * self.longest_token * _SHRINK:
            raise ContextTooLong(
                f"{field} has {len(text)} characters, more than {self.context} tokens can hold: shorten {field}.",
                param=field,
            )

    def check_ids(self, ids: list[int] | tuple[int, ...], field: str) -> None:
        """Raises RequestError for an id outside the vocabulary."""
        if ids and (max(ids) >= self.vocab or min(ids) < 0):
            unknown = next(index for index in ids if not 0 <= index < self.vocab)
            raise RequestError(
                f"{field} contains the token id {unknown}, which the vocabulary does not have: use 0 to {self.vocab - 1}.",
                param=field,
            )


@dataclass(frozen=True, slots=True)
class Embedder:
    """How the model makes a vector of a prompt. normalize: to length 1, unless a request says otherwise."""

    pooling: Pooling = "last"
    normalize: bool = True


@dataclass(frozen=True, slots=True)
class Service:
    """Everything a route needs."""

    config: ServiceConfig
    client: Client
    metrics: Metrics
    card: ModelCard
    tokenizer: Tokenizer
    templates: ChatTemplates
    grammars: GrammarChecks
    limits: Limits
    gate: Gate
    fingerprint: str
    """`system_fingerprint` of every answer: the server version."""
    moderation: Moderation
    shadow: Shadow | None = None
    pin_book: PinBook = field(default_factory=PinBook)
    answers: AnswerCache = field(default_factory=AnswerCache)
    embedder: Embedder = Embedder()
    judge: YesNo | None = None
    """What scores pairs of texts; None: the cosine of their vectors does."""

    def named(self, model: str | None) -> Service:
        """The service for a request for a model: an adapter has a card of its own."""
        card = self.card.of(model)
        return self if card is self.card else replace(self, card=card)

"""Offline use: `LLM(model).generate(prompts, SamplingParams(...))`, over the same engine and messages as the server."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from os import PathLike, fspath
from typing import Any

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import EngineFailed, RequestError
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.resolve import split_options
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import resolve_model
from ridgeline.text.chat import RenderOptions
from ridgeline.text.detokenize import Detokenizer
from ridgeline.text.prompts import ChatTemplates
from ridgeline.text.stops import StopStrings
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import Delta, Submit


@dataclass(slots=True)
class Choice:
    """One answer. finish: "stop", "length", "refused" or "error" (then `error` says why)."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Completion:
    """All answers to one prompt. cached_tokens: prompt tokens taken from the prefix cache."""

    prompt_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text


class LLM:
    """A model in this process. Options are the fields of ModelConfig and EngineConfig (max_model_len, dtype, ...)."""

    def __init__(
        self,
        model: str | PathLike[str] = "",
        *,
        progress: Callable[[str, int, int], None] | None = None,
        allow_special_in_content: bool = False,
        **options: Any,
    ) -> None:
        """allow_special_in_content: text in messages that spells a special token becomes that token. Otherwise it stays text;
        prompts that are texts keep their special tokens in any case."""
        model_options, engine_options = split_options(options, ModelConfig, EngineConfig)
        config = ModelConfig(model=fspath(model or ""), **model_options)
        folder = resolve_model(config)
        self.tokenizer = Tokenizer.load(folder)
        self._engine = LocalEngine.start(config, EngineConfig(**engine_options), progress)
        self._allow_special_in_content = allow_special_in_content
        self._count = 0
        self._answering = False

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete each prompt (text or token ids). Answers come in the order of the prompts.

        A prompt that cannot run (too long for the context, say) does not keep the others from it: its choices finish
        "refused". Raises RequestError for what is no prompt, and for sampling that names tokens the model has not.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {reprlib.repr(prompts)}: give a text or a list of prompts.", param="prompt")
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._answers(
            [_Work(self, self._ids(prompt), sampling or SamplingParams(), goes_on=True) for prompt in given]
        )

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None = None, **template: Any
    ) -> Completion:
        """Answer a conversation ({"role", "content"} messages)."""
        ids = self._chat_ids(messages, template)
        return self._answers([_Work(self, ids, sampling or SamplingParams(), goes_on=False)])[0]

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
    ) -> Iterator[str]:
        """Pieces of the one answer's text as they come; closing the iterator cancels the request. One call at a time.

        Raises RequestError for a prompt that is refused and for more answers than one, whose texts nobody could tell apart,
        EngineFailed when its step fails.
        """
        talk = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self._chat_ids(prompt, {}) if talk else self._ids(prompt)  # type: ignore[arg-type]
        work = _Work(self, ids, sampling or SamplingParams(), goes_on=not talk)
        if work.sampling.n > 1:
            raise RequestError(
                f"n is {work.sampling.n}, but a stream has one answer: set n to 1, or use `generate`.", param="n"
            )
        for _, piece in self._run([work]):
            if piece:
                yield piece
        for choice in work.completion.choices:
            if choice.finish in ("refused", "error"):
                raise (RequestError if choice.finish == "refused" else EngineFailed)(choice.error)

    def close(self) -> None:
        """Give the device's memory back; EngineFailed for whoever asks afterwards."""
        self._engine.close()

    def _answers(self, work: Sequence[_Work]) -> list[Completion]:
        for _ in self._run(work):
            pass
        return [one.completion for one in work]

    def _chat_ids(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> list[int]:
        options = RenderOptions(add_generation_prompt=True, variables=template)
        return self._templates.choose(tools=False).encode(messages, options=options).ids

    @cached_property
    def _templates(self) -> ChatTemplates:
        """Made for the first conversation, because they hold a second tokenizer."""
        return ChatTemplates(self.tokenizer, allow_special_in_content=self._allow_special_in_content)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        try:
            return [index(token) for token in prompt]
        except TypeError:
            raise RequestError(
                f"A prompt is {reprlib.repr(prompt)}: give a text or a list of token ids. For messages use `chat`.",
                param="prompt",
            ) from None

    def _check(self, sampling: SamplingParams) -> None:
        """Raises RequestError for a token id outside the vocabulary, where it would silently be of no effect."""
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling is {reprlib.repr(sampling)}: give one SamplingParams(...) for all prompts.")
        biased = [token for token, _ in sampling.logit_bias]
        for name, ids in (("allowed_token_ids", sampling.allowed_token_ids or ()), ("logit_bias", biased)):
            most = self._engine.engine.setup.vocab_size - 1
            if strange := [token for token in ids if not 0 <= token <= most]:
                raise RequestError(f"{name} has the token id {strange[0]}: give 0 to {most}.", param=name)

    def _next_id(self) -> str:
        self._count += 1
        return f"local-{self._count}"

    def _run(self, work: Sequence[_Work]) -> Iterator[tuple[int, str]]:
        """Submit, and yield (choice, new text) of each piece of news."""
        if self._answering:
            raise RequestError(
                "This LLM is busy: a stream is still open, or another thread uses it. Read the stream to its end or close it. For "
                "requests from several threads use a server."
            )
        self._answering = True
        by_id = {one.id: one for one in work}
        try:
            for one in work:
                self._engine.submit(Submit(one.id, one.completion.prompt_ids, one.sampling, time.time()))
            for delta in self._engine.news():
                one = by_id[delta.id]
                yield delta.choice, one.take(delta)
                if one.hit == delta.choice and not delta.finish:
                    kept = len(one.completion.choices[delta.choice].token_ids)
                    self._engine.finish(delta.id, delta.choice, "stop", kept)
                one.hit = None
        finally:
            self._answering = False


class _Work:
    """One prompt on its way: turns deltas into text, and notices stop strings.

    goes_on: the answers go on in the prompt's text, as those of /v1/completions do.
    """

    def __init__(self, llm: LLM, ids: list[int], sampling: SamplingParams, *, goes_on: bool) -> None:
        if not ids:
            raise RequestError("The prompt is empty: give at least one token.", param="prompt")
        llm._check(sampling)
        self.id = llm._next_id()
        self.sampling = sampling
        self.completion = Completion(ids, [Choice(index) for index in range(sampling.n)])
        self.hit: int | None = None
        self._texts = [
            Detokenizer(llm.tokenizer, skip_special_tokens=sampling.skip_special_tokens, context=ids if goes_on else ())
            for _ in range(sampling.n)
        ]
        self._stops = [
            StopStrings(sampling.stop, include_stop=sampling.include_stop, min_tokens=sampling.min_tokens)
            for _ in range(sampling.n)
        ]

    def take(self, delta: Delta) -> str:
        """Add a delta to its choice; returns the text that is certain now."""
        choice = self.completion.choices[delta.choice]
        if delta.cached >= 0:
            self.completion.cached_tokens = delta.cached
        if delta.prompt_logprobs is not None:
            self.completion.prompt_logprobs = delta.prompt_logprobs
        text, kept, hit = self._read(delta)
        choice.token_ids.extend(delta.tokens[:kept])
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs[:kept]
        if hit:
            self.hit = delta.choice
            choice.finish = "stop"
        elif delta.finish:
            choice.finish, choice.error = delta.finish, delta.error
        choice.text += text
        return text

    def _read(self, delta: Delta) -> tuple[str, int, bool]:
        """A delta's text, how many of its tokens count, and whether a stop string ended it (token by token, to see where)."""
        texts, stops = self._texts[delta.choice], self._stops[delta.choice]
        cut = delta.stop_id >= 0 and not self.sampling.include_stop
        text = ""
        for place, token in enumerate(delta.tokens[:-1] if cut else delta.tokens):
            shown, hit = stops.push(texts.push((token,)))
            text += shown
            if hit is not None:
                return text, place + 1, True
        if not delta.finish:
            return text, len(delta.tokens), False
        shown, hit = stops.push(texts.finish())
        return text + shown + stops.finish(), len(delta.tokens), hit is not None

"""Offline use: `LLM(model).generate(prompts, SamplingParams(...))`, over the same engine and messages as the server."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import EngineFailed, RequestError
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.plural import counted
from ridgeline.core.resolve import split_options
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import resolve_model
from ridgeline.text.chat import RenderOptions
from ridgeline.text.detokenize import Detokenizer
from ridgeline.text.prompts import ChatTemplates
from ridgeline.text.stops import StopStrings
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import Control, Delta, Reply, Submit


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter of a request, with the fields of vLLM's class: its name, a number, and its folder as PEFT saves it.

    The first request loads the folder; an adapter that `LLM(lora=...)` loads needs none. Adapters are told apart by name, so the
    number has no effect.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | PathLike[str] = ""


AnyLora = LoRARequest | str | None
"""Of a request: the adapter, the name of one that is loaded, or none."""

_READING_S = 0.005
"""Between two looks whether an adapter's files are read."""


@dataclass(slots=True)
class Choice:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    """Why the answer ended: "stop", "length", "refused", "unavailable" or "error"."""
    error: str = ""
    """The reason if `finish` is "refused", "unavailable" or "error"."""
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Completion:
    """All answers to one prompt."""

    prompt_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
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
        lora: Mapping[str, str | PathLike[str]] | None = None,
        **options: Any,
    ) -> None:
        """Load the model and start the engine.

        Args:
            model: Folder or hub name.
            progress: Called with (stage, done, total) while the model loads.
            allow_special_in_content: Message text that spells a special token becomes that token. By default it stays text.
                Text prompts of `generate` and `stream` always keep their special tokens.
            lora: LoRA adapters to load at the start: folders by name. The option lora_modules has the same as text.
            options: Fields of ModelConfig and EngineConfig.
        """
        if lora is not None:
            options["lora_modules"] = ",".join(f"{name}={fspath(folder)}" for name, folder in lora.items())
        model_options, engine_options = split_options(options, ModelConfig, EngineConfig)
        config = ModelConfig(model=fspath(model or ""), **model_options)
        folder = resolve_model(config)
        self.tokenizer = Tokenizer.load(folder)
        self._engine = LocalEngine.start(config, EngineConfig(**engine_options), progress)
        self._allow_special_in_content = allow_special_in_content
        self._count = 0
        self._answering = False

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        lora_request: AnyLora | Sequence[AnyLora] = None,
    ) -> list[Completion]:
        """Complete each prompt (text or token ids) and return the completions in the order of the prompts.

        A prompt that cannot run, for example one longer than the context, does not stop the others: its choices finish with
        "refused".

        Args:
            lora_request: LoRA adapter of all prompts, or a list with one entry for each. `lora` or the option enable_lora of LLM
                make room for it.

        Raises:
            RequestError: A prompt is neither text nor token ids, `sampling` names a token id outside the vocabulary, or an adapter
                cannot be loaded.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {reprlib.repr(prompts)}: give a text or a list of prompts.", param="prompt")
        prompt_list = [prompts] if isinstance(prompts, str) else list(prompts)
        loras: Sequence[Any] = (
            lora_request if isinstance(lora_request, (list, tuple)) else [lora_request] * len(prompt_list)
        )
        if len(loras) != len(prompt_list):
            raise RequestError(
                f"lora_request has {len(loras)} adapters for {counted(len(prompt_list), 'prompt')}: give one for each.",
                param="lora_request",
            )
        adapters = [self._adapter(lora) for lora in loras]
        return self._complete(
            [
                _PromptRun(
                    self, self._ids(prompt), sampling or SamplingParams(), continues_prompt=True, adapter=adapter
                )
                for prompt, adapter in zip(prompt_list, adapters, strict=True)
            ]
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        lora_request: AnyLora = None,
        **template: Any,
    ) -> Completion:
        """Answer a conversation.

        Args:
            messages: Dicts with "role" and "content".
            lora_request: As in `generate`.
            template: Variables for the chat template.
        """
        adapter, ids = self._adapter(lora_request), self._chat_ids(messages, template)
        run = _PromptRun(self, ids, sampling or SamplingParams(), continues_prompt=False, adapter=adapter)
        return self._complete([run])[0]

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        lora_request: AnyLora = None,
    ) -> Iterator[str]:
        """Yield the text of one answer in pieces as they arrive. Closing the iterator cancels the request.

        Only one stream can be open at a time. lora_request: as in `generate`.

        Raises:
            RequestError: The prompt is refused, or `sampling.n` is above 1.
            EngineFailed: A step of the request fails.
        """
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self._chat_ids(prompt, {}) if is_chat else self._ids(prompt)  # type: ignore[arg-type]
        adapter = self._adapter(lora_request)
        run = _PromptRun(self, ids, sampling or SamplingParams(), continues_prompt=not is_chat, adapter=adapter)
        if run.sampling.n > 1:
            raise RequestError(
                f"n is {run.sampling.n}, but a stream has one answer: set n to 1, or use `generate`.", param="n"
            )
        for _, piece in self._run([run]):
            if piece:
                yield piece
        for choice in run.completion.choices:
            if choice.finish in ("refused", "unavailable", "error"):
                raise (RequestError if choice.finish == "refused" else EngineFailed)(choice.error)

    def close(self) -> None:
        """Stop the engine and free the device memory. Later calls raise EngineFailed."""
        self._engine.close()

    def _complete(self, prompts: Sequence[_PromptRun]) -> list[Completion]:
        for _ in self._run(prompts):
            pass
        return [prompt.completion for prompt in prompts]

    def _chat_ids(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> list[int]:
        options = RenderOptions(add_generation_prompt=True, variables=template)
        return self._templates.choose(tools=False).encode(messages, options=options).ids

    @cached_property
    def _templates(self) -> ChatTemplates:
        """Chat templates. Loaded on first use, because they load a second tokenizer."""
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
        """Raise RequestError for a token id outside the vocabulary, which would silently have no effect."""
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling is {reprlib.repr(sampling)}: give one SamplingParams(...) for all prompts.")
        biased = [token for token, _ in sampling.logit_bias]
        for name, ids in (("allowed_token_ids", sampling.allowed_token_ids or ()), ("logit_bias", biased)):
            max_id = self._engine.engine.setup.vocab_size - 1
            if unknown := [token for token in ids if not 0 <= token <= max_id]:
                raise RequestError(f"{name} has the token id {unknown[0]}: give 0 to {max_id}.", param=name)

    def _adapter(self, lora: AnyLora) -> str:
        """The name of the adapter of a request, which is loaded then; "" for none. Raises RequestError."""
        if not lora:
            return ""
        asked = LoRARequest(lora) if isinstance(lora, str) else lora
        if not isinstance(asked, LoRARequest):
            raise RequestError(
                f"lora_request is {reprlib.repr(lora)}: give a LoRARequest or a name.", param="lora_request"
            )
        name, folder, engine = asked.lora_name, asked.lora_path, self._engine.engine
        roots = {adapter["name"]: Path(adapter["root"]) for adapter in engine.setup.adapters.listed()}
        if name in roots and (not folder or Path(folder) == roots[name]):
            return name
        if name in roots or not folder:
            problem = f"is loaded from {roots[name]}" if name in roots else "is not loaded"
            remedy = "give its folder, or an adapter another name"
            raise RequestError(f"The adapter {name!r} {problem}: {remedy}.", param="lora_request")
        while True:
            (reply,) = engine.handle(Control("local", "load_adapter", f"{name}={fspath(folder)}"))
            assert isinstance(reply, Reply)
            if "error" in reply.facts:
                raise RequestError(reply.facts["error"], param="lora_request")
            if not reply.facts.get("busy"):
                return name
            time.sleep(_READING_S)

    def _next_id(self) -> str:
        self._count += 1
        return f"local-{self._count}"

    def _run(self, prompts: Sequence[_PromptRun]) -> Iterator[tuple[int, str]]:
        """Submit the prompts and yield (choice, new text) for each delta."""
        if self._answering:
            raise RequestError(
                "This LLM is busy: a stream is still open, or another thread uses it. Read the stream to its end or close it. For "
                "requests from several threads use a server."
            )
        self._answering = True
        by_id = {prompt.id: prompt for prompt in prompts}
        try:
            for prompt in prompts:
                ids, now = prompt.completion.prompt_ids, time.monotonic()
                self._engine.submit(Submit(prompt.id, ids, prompt.sampling, now, adapter=prompt.adapter))
            for delta in self._engine.deltas():
                prompt = by_id[delta.id]
                yield delta.choice, prompt.take(delta)
                if prompt.stopped_choice == delta.choice and not delta.finish:
                    n_kept = len(prompt.completion.choices[delta.choice].token_ids)
                    self._engine.finish(delta.id, delta.choice, "stop", n_kept)
                prompt.stopped_choice = None
        finally:
            self._answering = False


class _PromptRun:
    """One running prompt: detokenizes its deltas and detects stop strings."""

    def __init__(
        self, llm: LLM, ids: list[int], sampling: SamplingParams, *, continues_prompt: bool, adapter: str = ""
    ) -> None:
        """continues_prompt: The answer continues the prompt's text, as in /v1/completions. adapter: name of its LoRA adapter."""
        if not ids:
            raise RequestError("The prompt is empty: give at least one token.", param="prompt")
        llm._check(sampling)
        self.id = llm._next_id()
        self.sampling, self.adapter = sampling, adapter
        self.completion = Completion(ids, [Choice(index) for index in range(sampling.n)])
        self.stopped_choice: int | None = None
        """The choice that the last delta ended with a stop string."""
        self._detokenizers = [
            Detokenizer(
                llm.tokenizer, skip_special_tokens=sampling.skip_special_tokens, context=ids if continues_prompt else ()
            )
            for _ in range(sampling.n)
        ]
        self._stop_strings = [
            StopStrings(sampling.stop, include_stop=sampling.include_stop, min_tokens=sampling.min_tokens)
            for _ in range(sampling.n)
        ]

    def take(self, delta: Delta) -> str:
        """Add a delta to its choice and return the new text. Text that may begin a stop string is held back."""
        choice = self.completion.choices[delta.choice]
        if delta.cached >= 0:
            self.completion.cached_tokens = delta.cached
        if delta.prompt_logprobs is not None:
            self.completion.prompt_logprobs = delta.prompt_logprobs
        text, n_kept, stopped = self._read(delta)
        choice.token_ids.extend(delta.tokens[:n_kept])
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs[:n_kept]
        if stopped:
            self.stopped_choice = delta.choice
            choice.finish = "stop"
        elif delta.finish:
            choice.finish, choice.error = delta.finish, delta.error
        choice.text += text
        return text

    def _read(self, delta: Delta) -> tuple[str, int, bool]:
        """Detokenize a delta token by token, to find the token that completes a stop string.

        Returns:
            The text, the number of tokens that count, and whether a stop string ended the choice.
        """
        detokenizer, stop_strings = self._detokenizers[delta.choice], self._stop_strings[delta.choice]
        cut = delta.stop_id >= 0 and not self.sampling.include_stop
        text = ""
        for position, token in enumerate(delta.tokens[:-1] if cut else delta.tokens):
            released, matched = stop_strings.push(detokenizer.push((token,)))
            text += released
            if matched is not None:
                return text, position + 1, True
        if not delta.finish:
            return text, len(delta.tokens), False
        released, matched = stop_strings.push(detokenizer.finish())
        return text + released + stop_strings.finish(), len(delta.tokens), matched is not None

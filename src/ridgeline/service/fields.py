"""The table of all fields of /v1/chat/completions and /v1/completions: honoured, ignored or refused, and how.

It contains the fields of OpenAI's API description and the extras that clients of other servers send.

- A field with a value reader is honoured, and `use` says its effect.
- A field with `neutral` has no effect here. Its value is checked and accepted, and the response header
  `x-ridgeline-ignored-fields` names it unless the value is neutral. Some clients always send such fields.
- A field with a `Refused` reader is answered with 400 and the reason, except for values that would change nothing.

`null` always means "not given". The header also names fields that the table does not contain, and values that the chat template
does not read: members of messages, `chat_template_kwargs`, `reasoning_effort`, `verbosity`. Tests of the service are generated
from `good` and `bad`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.core.dry import LONGEST_MATCH
from ridgeline.core.errors import RequestError
from ridgeline.core.sampling import MAX_LOGPROBS, MAX_STOP_IDS
from ridgeline.service.readers import (
    UNBOUNDED,
    Biases,
    Boolean,
    Integer,
    Items,
    Number,
    OneOf,
    Reader,
    Record,
    Refused,
    Special,
    Text,
    Texts,
    TokenIds,
    read_breakers,
    read_choices,
    read_grammar,
    read_pattern,
    read_response_format,
    read_schema,
    read_structured_outputs,
    wrong,
)
from ridgeline.text.tools import MAX_TOOLS

Route = Literal["chat", "completions"]

MAX_N = 128
MAX_STOPS = 16
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Choices of one call: prompts times n."""
MAX_MESSAGES = 8192
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 8192
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 256
"""Characters of a word."""
LONG = UNBOUNDED

TIERS = {"auto": 0, "default": 0, "scale": 0, "flex": 10, "priority": -10, "fast": -10}
"""`service_tier` as a priority (lower runs first)."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Field:
    """One field. use: its effect. good: accepted examples. bad: examples that are refused with 400 naming the field.

    neutral: for a field without effect, the values for which this makes no difference; None for a field with an effect.
    """

    name: str
    reader: Reader
    use: str
    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    routes: tuple[Route, ...] = ("chat", "completions")
    neutral: tuple[Any, ...] | None = None

    def ignored(self, value: Any) -> bool:
        """Whether an accepted value has no effect here although it should."""
        return self.neutral is not None and value not in self.neutral


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a body: checked values by name, and the names of fields without effect."""

    values: dict[str, Any]
    ignored: tuple[str, ...]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def read_fields(route: Route, body: Any) -> Fields:
    """Check a decoded JSON body against the table. Raises RequestError for the first wrong field."""
    if not isinstance(body, dict):
        raise RequestError(f"The body is not a JSON object: send an object with {', '.join(REQUIRED[route])}.")
    table = _BY_ROUTE[route]
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            ignored.append(name)
        elif value is not None:
            values[name] = field.reader.read(name, value)
            if field.ignored(value):
                ignored.append(name)
    for name in REQUIRED[route]:
        if name not in values:
            raise RequestError(f"{name} is missing: send {table[name].reader.expects}.", param=name)
    return Fields(values, tuple(ignored))


def read_prompts(name: str, value: Any, most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """A list of prompts, from a string, a list of strings, a list of token ids or a list of such lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if isinstance(value[0], int):
            return [_read_ids(name, value)]
        if len(value) > most:
            raise wrong(name, f"{len(value)} prompts", f"at most {most}")
        return [
            item if isinstance(item, str) else _read_ids(f"{name}[{index}]", item) for index, item in enumerate(value)
        ]
    raise wrong(name, value, PROMPT_FORMS)


def _read_ids(name: str, value: Any) -> list[int]:
    try:
        ids = list(TokenIds(LONG).read(name, value))
    except RequestError:
        raise wrong(name, value, PROMPT_FORMS) from None
    if not ids:
        raise wrong(name, value, "at least one token id")
    return ids


def _read_tool_choice(name: str, value: Any) -> str | dict[str, Any]:
    forms = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return value
    raise wrong(name, value, forms)


def _read_early_stopping(name: str, value: Any) -> bool | str:
    if isinstance(value, bool) or value == "never":
        return value  # type: ignore[no-any-return]
    raise wrong(name, value, 'true, false or "never"')


def read_cache_control(name: str, value: Any) -> dict[str, Any]:
    """The end of a cached prefix, in a chat completion: `{"type": "ephemeral", "ttl": "5m"}`."""
    return _read_control(name, value, _CONTROL)


def _read_prompt_control(name: str, value: Any) -> dict[str, Any]:
    """Also how much of the prompt it covers."""
    return _read_control(name, value, _PROMPT_CONTROL)


def _read_control(name: str, value: Any, reader: Record) -> dict[str, Any]:
    control = reader.read(name, value)
    if "type" not in control:
        raise wrong(name, value, 'an object with the member type, which is "ephemeral"')
    return control


PROMPT_FORMS = "a string, a list of strings, a list of token ids or a list of such lists"

TTLS = {"5m": 300.0, "1h": 3600.0}
"""Lifetimes of cached prefixes by name, in seconds."""
_CONTROL = Record({"type": OneOf(("ephemeral",)), "ttl": OneOf(tuple(TTLS))})
_PROMPT_CONTROL = Record({**_CONTROL.known, "tokens": Integer(0, LONG), "characters": Integer(0, LONG)})

_OBJECT = Record({}, open=True)
_BOOL = Boolean()
_LABEL = "a label: it is accepted and has no effect"
_CONTROLLED = "cache_control sets lifetimes"
_NO_STORE = "the server does not store answers, so this has no effect"
_BAD_BOOL: tuple[Any, ...] = ("yes", 1, [])
_CHAT: tuple[Route, ...] = ("chat",)
_TEXT: tuple[Route, ...] = ("completions",)
_RULE = {"type": "object", "properties": {"a": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": _RULE}}

# fmt: off
TABLE: tuple[Field, ...] = (
    # input
    Field("model", Text(512), "name of the served model (or its root); status 404 for another name", (), (7, ["x"])),
    Field("messages", Items(_OBJECT, MAX_MESSAGES, 1), "rendered with the model's chat template",
          ([{"role": "user", "content": "hi"}],), ("hi", [], [1], {}), _CHAT),
    Field("prompt", Special(PROMPT_FORMS, read_prompts), "text is tokenized, token ids are used as they are; n choices per prompt",
          ("hi", ["hi", "you"], [1, 2], [[1, 2], [3]]), (7, [], [[]], [None], [-1], {"a": 1}, [1, "a"], [1.5]), _TEXT),
    # length
    Field("max_tokens", Integer(0, LONG), "maximum tokens of the answer; 0 only scores the prompt (completions with echo)",
          (1, 5), (-1, 1.5, "7", True)),
    Field("max_completion_tokens", Integer(1, LONG), "the same as max_tokens", (5,), (0, -1, "7"), _CHAT),
    Field("min_tokens", Integer(0, LONG), "minimum tokens before an end token", (0, 2), (-1, "2")),
    Field("n", Integer(1, MAX_N), "number of choices per prompt", (1, 2), (0, MAX_N + 1, 1.5, "2")),
    Field("best_of", Integer(1, MAX_N), "number of beams with use_beam_search, else it may only equal n",
          (1,), (0, 7, "2"), _TEXT),
    # sampling
    Field("temperature", Number(0, 2), "0 is greedy decoding", (0, 0.7, 2), (-0.1, 2.1, "1", True)),
    Field("top_p", Number(0, 1), "nucleus sampling; 0 keeps only the most probable token", (0, 0.5, 1), (-0.1, 1.1, "1")),
    Field("top_k", Integer(-1, 1 << 20), "keep the k most probable tokens; 0 and -1 keep all", (-1, 0, 5), (-2, 1.5, "5")),
    Field("min_p", Number(0, 1), "drop tokens below this share of the most probable one", (0, 0.1), (-1, 2, "0")),
    Field("presence_penalty", Number(-2, 2), "subtracted once from tokens of the output", (0, -2, 2), (3, "1")),
    Field("frequency_penalty", Number(-2, 2), "subtracted per occurrence in the output", (0, 1), (-3, "1")),
    Field("repetition_penalty", Number(0, 100, above=True), "above 1 makes repetitions less probable", (1, 1.2), (0, "1")),
    Field("logit_bias", Biases(MAX_BIASES), "added to logits by token id", ({"5": 1}, {}), ({"x": 1}, {"5": 101}, {"5": "a"}, [5])),
    Field("allowed_token_ids", TokenIds(MAX_ALLOWED_IDS), "only these tokens are drawn", ([5, 6],), ([-1], 5, ["a"])),
    Field("bad_words", Texts(MAX_BAD_WORDS, MAX_BAD_WORD, single=False), "words that are not drawn (by their tokens)",
          ([], ["x", " y z"]), ("x", [""], [7])),
    Field("dry_multiplier", Number(0, 100), "above 0 penalizes the extension of repeated sequences (DRY)", (0, 0.8), (-1, "1")),
    Field("dry_base", Number(1, 100), "growth of this penalty per token of the sequence (default 1.75)", (1, 1.75), (0.5, "2")),
    Field("dry_allowed_length", Integer(1, LONGEST_MATCH), "shorter sequences are not penalized (default 2)", (1, 2), (0, 1.5, 51)),
    Field("dry_penalty_last_n", Integer(-1, LONG), "number of last tokens searched; -1 (default): all", (-1, 0, 64), (-2, "5")),
    Field("dry_sequence_breakers", Special("a list of strings, or such a list as JSON text", read_breakers),
          'texts that sequences do not cross (default "\\n", ":", "\\"" and "*")',
          ([], ["\n", "x"], '["\\n", ":"]', '"\\n", ":"'), (7, [""], [7], "[", '{"a": 1}')),
    Field("seed", Integer(-(1 << 63), (1 << 63) - 1), "the same seed draws the same tokens", (0, 7), (1.5, "7", 1 << 64)),
    Field("use_beam_search", _BOOL, "the n most probable answers of a beam search, without sampling", (False,), _BAD_BOOL),
    Field("length_penalty", Number(-10, 10), "the score of a beam is its log-probability by length ** length_penalty (default 1)",
          (1, 1.0), ("1", 11)),
    Field("early_stopping", Special("true, false or never", _read_early_stopping), "when the search ends (default false)",
          (False,), ("always", 1)),
    # end of the answer
    Field("stop", Texts(MAX_STOPS), "strings that end the answer", ("x", ["x", "y"], []), (7, [""], "", [7], ["x"] * 17)),
    Field("stop_token_ids", TokenIds(MAX_STOP_IDS), "tokens that end the answer", ([5],), ([-1], "5", list(range(17)))),
    Field("include_stop_str_in_output", _BOOL, "keep the stop string in the answer", (True, False), _BAD_BOOL),
    Field("ignore_eos", _BOOL, "continue after the model's end tokens", (True, False), _BAD_BOOL),
    # output
    Field("stream", _BOOL, "send the answer as server-sent events", (False,), _BAD_BOOL),
    Field("stream_options",
          Record({"include_usage": _BOOL, "continuous_usage_stats": _BOOL,
                  "include_obfuscation": Refused("chunks are not padded", (False,))}),
          "usage at the end or in every chunk; only with stream", (), (True, {"include_usage": 1}, {"x": True})),
    Field("logprobs", _BOOL, "log-probability of every token of the answer", (True, False), (1, "true"), _CHAT),
    Field("top_logprobs", Integer(0, MAX_LOGPROBS), "alternatives per token; needs logprobs", (), (-1, 21, "2"), _CHAT),
    Field("logprobs", Integer(0, MAX_LOGPROBS), "log-probabilities, with this number of alternatives per token",
          (0, 3), (-1, 21, "2", True), _TEXT),
    Field("prompt_logprobs", Integer(0, MAX_LOGPROBS), "the same for prompt tokens; not with stream", (0, 1), (-1, 21, "1")),
    Field("echo", _BOOL, "put the prompt before the answer", (True, False), _BAD_BOOL, _TEXT),
    Field("skip_special_tokens", _BOOL, "hide special tokens in the text", (True, False), _BAD_BOOL),
    Field("include_reasoning", _BOOL, "false leaves reasoning_content out", (True, False), _BAD_BOOL, _CHAT),
    # structured output
    Field("response_format", Special("an object with type", read_response_format), "constrains the output to a grammar",
          ({"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": _RULE}}),
          ("json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 7}})),
    Field("structured_outputs", Special("an object", read_structured_outputs), "constrains the output to a grammar",
          ({"json": _RULE}, {"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"json_object": True}),
          ("x", {"xml": 1}, {"regex": 7}, {"choice": []}, {"regex": "a", "choice": ["a"]})),
    Field("guided_json", Special("a JSON schema", read_schema), "as structured_outputs.json", (_RULE,), (7, "{")),
    Field("guided_regex", Special("a string", read_pattern("regex")), "as structured_outputs.regex", ("[ab]+",), (7, "")),
    Field("guided_choice", Special("a list", read_choices), "as structured_outputs.choice", (["a", "b"],), (7, [], [1])),
    Field("guided_grammar", Special("a string", read_grammar), "as structured_outputs.grammar: GBNF or Lark",
          ('start: "a" | "b"', 'root ::= "a" | "b"'), (7, "")),
    Field("grammar", Special("a string", read_pattern("gbnf")), "a grammar in GBNF, as llama.cpp takes it",
          ('root ::= "a" | "b"',), (7, "", 'start: "a"')),
    # tools
    Field("tools", Items(_OBJECT, MAX_TOOLS), "shown to the model by its template; arguments must match their schema",
          ([], [_TOOL]), (7, [7], [{"type": "custom"}], [{"type": "function"}]), _CHAT),
    Field("tool_choice", Special("none, auto, required or a function", _read_tool_choice), "whether a tool must be called",
          ("none", "auto"), ("must", 7, {"type": "function"}), _CHAT),
    Field("parallel_tool_calls", _BOOL, "false allows one call at most", (True, False), _BAD_BOOL, _CHAT),
    Field("functions", Refused("it was replaced by tools", ([],)), "", ([],), ([{"name": "f"}],), _CHAT),
    Field("function_call", Refused("it was replaced by tool_choice", ("none", "auto")), "", ("none",), ({"name": "f"},), _CHAT),
    # the template
    Field("chat_template", Refused("set the template with --chat-template at start"), "",
          (), ("{{ x }}",), _CHAT),
    Field("chat_template_kwargs", _OBJECT, "variables of the template", ({"enable_thinking": False},), (7, []), _CHAT),
    Field("add_generation_prompt", _BOOL, "open the assistant's turn (default true)", (True,), _BAD_BOOL, _CHAT),
    Field("continue_final_message", _BOOL, "continue the last message; needs add_generation_prompt false",
          (False,), _BAD_BOOL, _CHAT),
    Field("add_special_tokens", _BOOL, "add the tokenizer's tokens around text (default: true for completions, false for chat)",
          (True, False), _BAD_BOOL),
    Field("reasoning_effort", OneOf(EFFORTS), "variables reasoning_effort and enable_thinking of the template, if it reads them",
          ("none", "low"), ("huge", 7), _CHAT),
    Field("max_thinking_tokens", Integer(0, LONG), "maximum tokens of reasoning, where its end is a token of the model",
          (0, 64), (-1, "5", True), _CHAT),
    Field("thinking_token_budget", Integer(0, LONG), "as max_thinking_tokens", (0, 64), (-1, "5", True), _CHAT),
    Field("verbosity", OneOf(VERBOSITIES), "variable verbosity of the template, if it reads it",
          ("low", "medium", "high"), ("huge", 7), _CHAT),
    Field("verbosity", OneOf(VERBOSITIES), "a variable of chat templates: completions do not use a template, so it has no effect",
          ("low", "medium", "high"), ("huge", 7), _TEXT, neutral=()),
    # scheduling and caching
    Field("priority", Integer(-(1 << 31), (1 << 31) - 1), "requests with a lower number run first", (0, -5), (1.5, "1")),
    Field("service_tier", OneOf(tuple(TIERS)), "a priority: flex runs after, priority and fast before the default",
          ("auto", "flex"), ("gold", 1)),
    Field("cache_salt", Text(256), "prefixes are shared only among equal salts", ("a",), (7,)),
    Field("prompt_cache_key", Text(1024), "a routing hint without effect: every prefix is cached", ("a",), (7,)),
    Field("prompt_cache_options",
          Record({"mode": Refused(_CONTROLLED, ("implicit",)), "ttl": Refused(_CONTROLLED)}),
          "every prefix is cached; breakpoints are set with cache_control",
          ({"mode": "implicit"}, {}), ({"mode": "explicit"}, {"ttl": "30m"}, 7)),
    Field("prompt_cache_retention", Refused(_CONTROLLED, ("in_memory",)), "", ("in_memory",), ("24h",)),
    Field("cache_control", Special('an object with type "ephemeral" and ttl', read_cache_control),
          "the prompt up to the end of messages stays cached for ttl; also on tools, messages and parts of their content",
          ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}),
          ({"type": "x"}, {"ttl": "5m"}, {"type": "ephemeral", "ttl": "2h"}, 7), _CHAT),
    Field("cache_control", Special('an object with type "ephemeral" and ttl', _read_prompt_control),
          "the first tokens or characters of the prompt, or all of it, stay cached for ttl",
          ({"type": "ephemeral", "characters": 1}, {"type": "ephemeral", "ttl": "1h", "tokens": 1}),
          ({"type": "ephemeral", "tokens": -1}, {"ttl": "5m"}, "5m"), _TEXT),
    # labels
    Field("user", Text(1024), _LABEL, ("a",), (7,)),
    Field("safety_identifier", Text(1024), _LABEL, ("a",), (7,)),
    Field("metadata", Record({}, open=True), _NO_STORE, ({"a": "b"}, {}), ("a", 7),
          neutral=({},)),
    Field("store", _BOOL, _NO_STORE, (False, True), ("x", 1), neutral=(False,)),
    Field("session_id", Text(1024), _LABEL, ("a",), (7,)),
    Field("request_id", Text(256), "the request id, as the header x-request-id", ("a",), (7,)),
    # not supported
    Field("modalities", Refused("the model writes text only", (["text"],)), "", (["text"],), (["text", "audio"], 7)),
    Field("audio", Refused("the model writes text only"), "", (), ({"voice": "a", "format": "wav"},)),
    Field("prediction", Refused(), "", (), ({"type": "content", "content": "a"},)),
    Field("moderation", Refused("the option --moderation of the server decides"), "", (), ({"model": "m"},)),
    Field("web_search_options", Refused("the server does not search the web"), "", (), ({},)),
    Field("suffix", Refused(neutral=("",)), "", ("",), ("x",), _TEXT),
    Field("truncate_prompt_tokens", Refused("prompts are never truncated, so send a shorter one"), "", (), (5,)),
    Field("logits_processors", Refused("requests cannot contain code", ([],)), "", ([],), (["x"],)),
)
# fmt: on

REQUIRED: dict[Route, tuple[str, ...]] = {"chat": ("messages",), "completions": ("prompt",)}

_ROUTES: tuple[Route, ...] = ("chat", "completions")
_BY_ROUTE: dict[Route, dict[str, Field]] = {
    route: {field.name: field for field in TABLE if route in field.routes} for route in _ROUTES
}

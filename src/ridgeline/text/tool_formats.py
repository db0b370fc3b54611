# ruff: noqa: RUF001 - DeepSeek's tags have fullwidth bars
"""The formats of tool calls as data, and which one a chat template uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ridgeline.core.errors import ConfigError
from ridgeline.text.chat import ChatTemplate

AUTO, NONE = "auto", "none"
"""Values of --reasoning-parser and --tool-call-parser beside the names of parsers: by the chat template, and no parser."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `begin`, calls, `end`. A call is `open`, its body, `close`; `between` separates two calls.

    body: "object" is a JSON object with a name and arguments; "named" is the name, `separator` and a JSON object of arguments;
    "python" is a call of a Python function with literals. template: the body as models write it. is_list: the calls are the
    elements of a list. marker: a token without meaning that may stand before the first call. Without `begin` and `open` only the
    start of an output can be a call. in_content: templates look for the tags in the text of earlier answers.
    """

    name: str
    open: str = ""
    close: str = ""
    body: Literal["object", "named", "python"] = "object"
    template: str = '{"name": "$name", "arguments": $arguments}'
    between: str = ""
    begin: str = ""
    end: str = ""
    is_list: bool = False
    marker: str = ""
    end_marker: str = ""
    """A token without meaning that may stand after the last call."""
    lead: str = ""
    """Text before the name of a "named" body."""
    separator: str = ""
    in_content: bool = False

    @property
    def first(self) -> str:
        """The tag at which calls begin; "" in a format without tags."""
        return self.begin or self.open

    @property
    def tags(self) -> str:
        """All text that is not the model's own, in one string."""
        return "".join(
            (self.marker, self.begin, self.open, self.lead, self.separator, self.close, self.end, self.end_marker)
        )


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    template='\n{"name": "$name", "arguments": $arguments}\n',
    between="\n",
    in_content=True,
)
LLAMA3 = ToolFormat(
    "llama3_json", template='{"name": "$name", "parameters": $arguments}', between="; ", marker="<|python_tag|>"
)
PYTHONIC = ToolFormat(
    "pythonic",
    body="python",
    template="$name($arguments)",
    between=", ",
    is_list=True,
    marker="<|python_start|>",
    end_marker="<|python_end|>",
)
MISTRAL = ToolFormat("mistral", begin="[TOOL_CALLS]", is_list=True, between=", ")
MISTRAL_ARGS = ToolFormat(
    "mistral_args", "[TOOL_CALLS]", body="named", template="$name[ARGS]$arguments", separator="[ARGS]"
)
GRANITE = ToolFormat("granite", begin="<|tool_call|>", is_list=True, between=", ")
COHERE = ToolFormat(
    "cohere2",
    template='{"tool_call_id": "$id", "tool_name": "$name", "parameters": $arguments}',
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    is_list=True,
    between=",\n    ",
)
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    _DEEPSEEK_OPEN,
    "```" + _DEEPSEEK_CLOSE,
    "named",
    f"function{_DEEPSEEK_SEPARATOR}$name\n```json\n$arguments\n",
    "\n",
    _DEEPSEEK_BEGIN,
    _DEEPSEEK_END,
    lead=f"function{_DEEPSEEK_SEPARATOR}",
    separator="\n```json",
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    _DEEPSEEK_OPEN,
    _DEEPSEEK_CLOSE,
    "named",
    f"$name{_DEEPSEEK_SEPARATOR}$arguments",
    "",
    _DEEPSEEK_BEGIN,
    _DEEPSEEK_END,
    separator=_DEEPSEEK_SEPARATOR,
)
GLM4 = ToolFormat(
    "glm4", body="named", template="$name\n$arguments", between="<|assistant|>", marker="<|assistant|>", separator="\n"
)
HARMONY = ToolFormat(
    "openai",
    "<|channel|>commentary to=",
    "<|call|>",
    "named",
    "functions.$name<|message|>$arguments",
    lead="functions.",
    separator="<|message|>",
)
"""As text.harmony writes the header of a call, whose words a model may order in several ways."""

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            HERMES,
            LLAMA3,
            PYTHONIC,
            MISTRAL,
            MISTRAL_ARGS,
            GRANITE,
            COHERE,
            DEEPSEEK_V3,
            DEEPSEEK_V31,
            GLM4,
            HARMONY,
        )
    }
    | {
        "qwen": HERMES,
        "llama3": LLAMA3,
        "llama4_json": LLAMA3,
        "llama4_pythonic": PYTHONIC,
        "command_r7b": COHERE,
        "gpt-oss": HARMONY,
    }
)
"""By the names of --tool-call-parser, which are those of vLLM where it has the format, and other names in use."""

_SIGNS: tuple[tuple[ToolFormat | None, tuple[str, ...]], ...] = (
    (None, ("<function=",)),
    (None, ("<arg_key>",)),
    (HARMONY, ("<|channel|>", "functions.")),
    (DEEPSEEK_V3, (_DEEPSEEK_BEGIN, "```json")),
    (DEEPSEEK_V31, (_DEEPSEEK_BEGIN,)),
    (COHERE, ("<|START_ACTION|>",)),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (GRANITE, ("<|tool_call|>",)),
    (HERMES, ("<tool_call>",)),
    (PYTHONIC, ("[func_name1(",)),
    (LLAMA3, ("<|python_tag|>",)),
    (LLAMA3, ("ipython", '"parameters"')),
    (GLM4, ("<|observation|>", "<|assistant|>")),
)
"""Texts that a template contains all of, in the order of trial. None: formats that are not supported."""


def detect_format(template: ChatTemplate) -> ToolFormat | None:
    """The call format in a chat template; None if the template takes no tools or uses an unknown format."""
    if "tools" not in template.names:
        return None
    return next((form for form, signs in _SIGNS if all(sign in template.source for sign in signs)), None)


def choose_format(name: str, template: ChatTemplate) -> ToolFormat | None:
    """The format of the option --tool-call-parser. Raises ConfigError for an unknown name."""
    if name in (AUTO, NONE):
        return detect_format(template) if name == AUTO else None
    if name not in TOOL_FORMATS:
        known = ", ".join((AUTO, NONE, *TOOL_FORMATS))
        raise ConfigError(f"tool_call_parser is {name!r}: use one of {known}.")
    return TOOL_FORMATS[name]

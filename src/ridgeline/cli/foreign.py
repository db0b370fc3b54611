"""Options of other servers that have none here: start scripts bring them along. One that asks for what is so anyway is left out
and said; one that asks for something else is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Foreign:
    """said: what is so here. values: those that ask for it; None: any, and empty: it is a switch. asked: whether the switch asks
    for it."""

    said: str
    values: tuple[str, ...] | None = ()
    asked: bool = True


_ONE = Foreign("a server runs on one device, so start one server per device", ("1",))
_LOGS = Foreign("requests are counted and never logged")
_TEMPLATE = "the chat template defines the format of tool calls and reasoning"
FOREIGN: Mapping[str, Foreign] = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp", "--tp-size"), _ONE),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--dp", "--dp-size"), _ONE),
    **dict.fromkeys(("--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"), _LOGS),
    "--trust-remote-code": Foreign("code in a model folder is never executed, and a model that needs it is refused"),
    "--enable-chunked-prefill": Foreign("long prompts always run in chunks"),
    "--no-enable-chunked-prefill": Foreign("long prompts always run in chunks", asked=False),
    "--kv-cache-dtype": Foreign("the KV cache has the dtype of the model", ("auto",)),
    "--scheduling-policy": Foreign("requests run in the order of priority and arrival", ("priority", "fcfs")),
    "--swap-space": Foreign("preempted requests are recomputed, never swapped", None),
    "--enable-auto-tool-choice": Foreign(_TEMPLATE),
    "--tool-call-parser": Foreign(_TEMPLATE, None),
    "--reasoning-parser": Foreign(_TEMPLATE, None),
    "--enable-lora": Foreign("merge the adapter into the weights", asked=False),
}


def without_foreign(words: Sequence[str], own: Sequence[str], notes: list[str]) -> Iterator[str]:
    """The words of a command line but for foreign options, of which notes get a sentence each. own: options of the command, which
    win. Raises ConfigError for one that asks for what is not so."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        found = None if name in own else FOREIGN.get(name)
        if found is None:
            yield word
            continue
        if found.values != () and not equals:
            value = next(rest, "")
        if not found.asked or (found.values and value not in found.values):
            raise ConfigError(f"{' '.join(filter(None, (name, value)))} is not supported: {found.said}.")
        notes.append(f"{name} is not needed: {found.said}.")

"""Options of other servers that have no equivalent here, so that their start scripts keep working.

An option that requests what Ridgeline does anyway is dropped with a note. An option that requests something else is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """How an option of another server is handled."""

    reason: str
    """What Ridgeline does instead; the text of the note and of the error."""
    values: tuple[str, ...] | None = ()
    """Accepted values. None: any value. Empty: a switch without a value."""
    accepted: bool = True
    """Whether the switch is accepted; False: always an error."""


_NO_REQUEST_LOG = ForeignOption("prompts and answers are never logged, and requests only with --log-level info")
_TEMPLATE = "tools of a request may always be called"
FOREIGN: Mapping[str, ForeignOption] = {
    **dict.fromkeys(("--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"), _NO_REQUEST_LOG),
    "--trust-remote-code": ForeignOption(
        "code in a model folder is never executed, and a model that needs it is refused"
    ),
    "--enable-chunked-prefill": ForeignOption("long prompts always run in chunks"),
    "--no-enable-chunked-prefill": ForeignOption("long prompts always run in chunks", accepted=False),
    "--scheduling-policy": ForeignOption("requests run in the order of priority and arrival", ("priority", "fcfs")),
    "--swap-space": ForeignOption("preempted requests are recomputed, never swapped", None),
    "--enable-auto-tool-choice": ForeignOption(_TEMPLATE),
}


def without_foreign(words: Sequence[str], flag_names: Sequence[str], notes: list[str]) -> Iterator[str]:
    """Yield the words of a command line without foreign options. Appends a sentence to `notes` for each dropped option.

    flag_names: options of the command; they take precedence over foreign options of the same name.
    Raises ConfigError for an option that is not supported.
    """
    words_left = iter(words)
    for word in words_left:
        name, equals, value = word.partition("=")
        option = None if name in flag_names else FOREIGN.get(name)
        if option is None:
            yield word
            continue
        if option.values != () and not equals:
            value = next(words_left, "")
        if not option.accepted or (option.values and value not in option.values):
            raise ConfigError(f"{' '.join(filter(None, (name, value)))} is not supported: {option.reason}.")
        notes.append(f"{name} is not needed: {option.reason}.")

"""Command-line flags derived from the configuration dataclasses: one per field, with aliases of other servers."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from ridgeline.cli.foreign import without_foreign
from ridgeline.cli.option_groups import GROUPS
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import (
    CHOICES,
    CONFIGS,
    ENVIRONMENT,
    INTEGER_TEXT,
    option_fields,
    option_types,
    read_integer,
)
from ridgeline.core.sampling import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "n", "stop")
"""Fields of SamplingParams that have a flag."""

JOINED = frozenset({"lora_modules"})
"""Options that may be given several times: their values are joined by commas."""
_METAVARS = {str: "TEXT", int: "N", float: "X"}
_EPILOG = (
    "Whole numbers may end in k, m, g (powers of 1000) or K, M, G (powers of 1024). Every option can also be set by an "
    f"environment variable ({ENVIRONMENT}MAX_MODEL_LEN=8K) or in a file (--config). Flags override the environment, and the "
    "environment overrides the file. --help=WORD shows the options whose help mentions WORD."
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Parsed command line."""

    flags: dict[str, Any]
    """Configuration field -> text, or bool for a switch. Contains only fields that the user gave."""
    config: Path | None
    """File of --config."""
    options: argparse.Namespace
    """Arguments of this command that are not configuration fields."""


class _Join(argparse.Action):
    """Joins the values of an option that is given several times."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError, so that `main` reports every usage error in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `{self.prog} --help` lists the options.")


def whole_number(text: str) -> int:
    """Argparse type: a whole number, with the suffixes of configuration fields (8K, 1.5M)."""
    try:
        return read_integer(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {INTEGER_TEXT}") from None


def finite_number(text: str) -> float:
    """Argparse type: a finite number. Rejects nan and inf, because comparisons with limits do not catch them."""
    try:
        if math.isfinite(value := float(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")


def parser_for(command: str, text: str, configs: Sequence[type], *, model: bool = True) -> Parser:
    """Create a parser with one flag per field of `configs`. model: the first positional argument is MODEL."""
    parser = Parser(
        prog=f"ridgeline {command}",
        usage=f"ridgeline {command}{' [MODEL]' if model else ''} [options]" if configs else None,
        description=text,
        epilog=_EPILOG if configs else None,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if model:
        parser.add_argument("given_model", nargs="?", metavar="MODEL", help=_model_help())
    if configs:
        parser.add_argument("--config", metavar="FILE", help="TOML, JSON or YAML file of options")
    add_options(parser, configs)
    return parser


def add_options(parser: argparse.ArgumentParser, configs: Sequence[type], names: Collection[str] | None = None) -> None:
    """Add one flag per field of `configs`: those of a server in groups by purpose (GROUPS), others in a group per configuration.

    names: of these fields only.
    """
    types = option_types(configs)
    members = {
        field.name: field for config in configs for field in fields(config) if names is None or field.name in names
    }
    of_server = option_fields(config for config in configs if config in CONFIGS)
    for title, grouped in GROUPS.items():
        if present := [name for name in grouped.split() if name in of_server and name in members]:
            group = parser.add_argument_group(title)
            for name in present:
                _add_option(group, members[name], types[name][0])
    for config in configs:
        if config not in CONFIGS:
            group = parser.add_argument_group(
                f"{config.__name__.removesuffix('Config').lower()} options", config.__doc__
            )
            for field in fields(config):
                if field.name in members:
                    _add_option(group, field, types[field.name][0])


def _add_option(group: argparse._ArgumentGroup, field: Field[Any], value_type: type) -> None:
    flags = [f"--{field.name.replace('_', '-')}", *field.metadata["flags"]]
    help_text = (field.metadata["help"] + _default_text(field)).replace("%", "%%")
    if value_type is bool:
        group.add_argument(*flags, dest=field.name, action=argparse.BooleanOptionalAction, help=help_text)
    elif field.name in JOINED:
        group.add_argument(*flags, dest=field.name, action=_Join, metavar="NAME=FOLDER", help=help_text)
    else:
        choices = [word for word in CHOICES.get(field.name, ()) if word]
        metavar = "{" + ",".join(choices) + "}" if choices else _METAVARS[value_type]
        group.add_argument(*flags, dest=field.name, metavar=metavar, help=help_text)


def read_flags(parser: Parser, argv: Sequence[str]) -> Arguments:
    """Parse the arguments of a command. Raises ConfigError for an unknown flag and names the most similar one."""
    words, flag_names = [_with_dashes(word) for word in argv], _names(parser)
    if "--enforce-eager" in flag_names:  # only commands that run an engine have it
        notes: list[str] = []
        words = list(without_foreign(words, flag_names, notes))
        for note in notes:
            print(f"ridgeline: {note}", file=sys.stderr)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise _unknown(parser, unknown[0])
    known = option_types()
    flags = {name: value for name, value in vars(namespace).items() if name in known}
    model = getattr(namespace, "given_model", None)
    if model is not None:
        if flags.get("model", model) != model:
            raise ConfigError(f"Two models are given, {model!r} and {flags['model']!r}: keep one.", param="model")
        flags["model"] = model
    config = getattr(namespace, "config", None)
    options = {name: value for name, value in vars(namespace).items() if name not in (*known, "given_model", "config")}
    return Arguments(flags, None if config is None else Path(config), argparse.Namespace(**options))


def search_help(parser: Parser, word: str) -> str:
    """Help of the options whose name or help text contains `word`."""
    formatter = parser._get_formatter()
    matches = 0
    for action in _actions(parser):
        searched = " ".join((*action.option_strings, action.help or ""))
        if word.lower().replace("_", "-") in searched.lower() and action.help != argparse.SUPPRESS:
            formatter.add_argument(action)
            matches += 1
    if matches:
        return formatter.format_help()
    similar = difflib.get_close_matches(word, [name.strip("-") for name in _names(parser)], n=3, cutoff=0.5)
    return f"No option mentions {word!r}." + (f" Similar options: {', '.join(similar)}.\n" if similar else "\n")


def check_output_paths(options: Mapping[str, Any], *names: str, folder: bool = False) -> None:
    """Raise ConfigError for an output path that cannot be written. Call it before the work starts.

    An existing file is accepted, because it will be replaced. A folder must be empty or not exist.
    """
    for name in names:
        if not (value := options.get(name)):
            continue
        path = Path(value).absolute()
        parent = path if folder else path.parent
        while folder and not parent.exists():
            parent = parent.parent
        flag = f"--{name.replace('_', '-')} {value}"
        if not folder and path.is_dir():
            raise ConfigError(f"{flag} is a folder: give the name of a file.", param=name)
        if folder and path.is_dir() and os.access(path, os.R_OK) and any(path.iterdir()):
            raise ConfigError(f"{flag} is not empty: give a folder that does not exist yet.", param=name)
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ConfigError(f"{flag} cannot be written: {parent} is not a writable folder.", param=name)


def _with_dashes(word: str) -> str:
    """Write underscores of a flag as dashes: `--max_model_len=4` -> `--max-model-len=4`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _names(parser: Parser) -> list[str]:
    return [name for action in _actions(parser) for name in action.option_strings]


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Actions of a parser and of its subcommands, without duplicates."""
    actions: dict[tuple[str, ...], argparse.Action] = {}
    for action in parser._actions:
        actions[(*action.option_strings, action.dest)] = action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                actions.update({(*nested.option_strings, nested.dest): nested for nested in _actions(subparser)})
    return list(actions.values())


def _unknown(parser: Parser, word: str) -> ConfigError:
    name = word.partition("=")[0]
    names = {known.lstrip("-"): known for known in _names(parser)}  # two equal dashes are no similarity
    similar = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=0.7)
    hint = f"did you mean {names[similar[0]]}?" if similar else f"`{parser.prog} --help` lists the options."
    kind = "option" if name.startswith("-") else "argument"
    return ConfigError(f"Unknown {kind} {name!r}: {hint}")


def _default_text(field: Field[Any]) -> str:
    if field.default is None or field.default is False or field.default == "" or "(default: " in field.metadata["help"]:
        return ""
    return f" (default: {field.default})"


def _model_help() -> str:
    return next(str(field.metadata["help"]) for field in fields(ModelConfig) if field.name == "model")


_SAMPLING_HELP: Mapping[str, str] = {
    "temperature": "0 is greedy decoding",
    "top_p": "nucleus sampling: keep the most probable tokens up to this total probability",
    "top_k": "keep this number of most probable tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the most probable token",
    "repetition_penalty": "above 1: tokens of prompt and output get less probable",
    "max_tokens": "maximum tokens of an answer",
    "n": "number of answers to each prompt",
    "stop": "stop string, which ends the answer; may be repeated",
}


def add_sampling(parser: Parser, names: Sequence[str] = SAMPLING) -> None:
    """Add flags for fields of SamplingParams."""
    group = parser.add_argument_group("sampling options")
    types = get_type_hints(SamplingParams)
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        if name == "stop":
            group.add_argument(flag, action="append", metavar="TEXT", help=_SAMPLING_HELP[name])
        else:
            number = finite_number if types[name] is float else whole_number
            group.add_argument(
                flag, type=number, metavar="X" if number is finite_number else "N", help=_SAMPLING_HELP[name]
            )


def read_sampling(args: Arguments) -> dict[str, Any]:
    """Values of the sampling flags that were given, as arguments of SamplingParams."""
    values = {name: getattr(args.options, name) for name in SAMPLING if hasattr(args.options, name)}
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    return values

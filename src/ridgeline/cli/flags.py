"""Flags derived from the configuration dataclasses: one per field, with the other names its users know."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from ridgeline.cli.foreign import without_foreign
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import CHOICES, ENVIRONMENT, INTEGER_TEXT, option_types, read_integer
from ridgeline.core.sampling import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "n", "stop")
"""Fields of SamplingParams that have a flag."""

_METAVARS = {str: "TEXT", int: "N", float: "X"}
_EPILOG = (
    "Whole numbers may end in k, m, g (powers of 1000) or K, M, G (powers of 1024). Every option can also be set by the "
    f"environment ({ENVIRONMENT}MAX_MODEL_LEN=8K) or in a file (--config); flags win over the environment, the "
    "environment over the file. --help=WORD shows the options whose help mentions WORD."
)


@dataclass(frozen=True, slots=True)
class Given:
    """What a user typed. flags: configuration field -> text (or bool), only what was given. config: the file named by
    --config. rest: the command's own arguments."""

    flags: dict[str, Any]
    config: Path | None
    rest: argparse.Namespace


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors, so that every mistake ends in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `{self.prog} --help` lists the options.")


def whole(text: str) -> int:
    """A whole number on the command line, as configuration fields take them (8K, 1.5M)."""
    try:
        return read_integer(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {INTEGER_TEXT}") from None


def finite(text: str) -> float:
    """A number on the command line; nan and inf are none, since every limit lets them through."""
    try:
        if math.isfinite(value := float(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")


def parser_for(command: str, text: str, configs: Sequence[type], *, model: bool = True) -> Parser:
    """A parser with one flag per field of `configs`, and MODEL as first word if the command takes one."""
    parser = Parser(
        prog=f"ridgeline {command}",
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


def add_options(parser: argparse.ArgumentParser, configs: Sequence[type]) -> None:
    """One flag per field of `configs`, a group for each."""
    types = option_types(configs)
    for config in configs:
        group = parser.add_argument_group(f"{config.__name__.removesuffix('Config').lower()} options", config.__doc__)
        for one in fields(config):
            plain, _ = types[one.name]
            names = [f"--{one.name.replace('_', '-')}", *one.metadata["flags"]]
            words = one.metadata["help"].replace("%", "%%") + _default_words(one.default)
            if plain is bool:
                group.add_argument(*names, dest=one.name, action=argparse.BooleanOptionalAction, help=words)
            else:
                choices = [word for word in CHOICES.get(one.name, ()) if word]
                metavar = "{" + ",".join(choices) + "}" if choices else _METAVARS[plain]
                group.add_argument(*names, dest=one.name, metavar=metavar, help=words)


def read_flags(parser: Parser, argv: Sequence[str]) -> Given:
    """Read a command's arguments. Raises ConfigError with the nearest flag for one that does not exist."""
    words, own = [_dashed(word) for word in argv], _names(parser)
    if "--enforce-eager" in own:  # it runs an engine
        notes: list[str] = []
        words = list(without_foreign(words, own, notes))
        for note in notes:
            print(f"ridgeline: {note}", file=sys.stderr)
    space, unknown = parser.parse_known_args(words)
    if unknown:
        raise _unknown(parser, unknown[0])
    known = option_types()
    given = {name: value for name, value in vars(space).items() if name in known}
    model = getattr(space, "given_model", None)
    if model is not None:
        if given.get("model", model) != model:
            raise ConfigError(f"Two models are given, {model!r} and {given['model']!r}: keep one.", param="model")
        given["model"] = model
    config = getattr(space, "config", None)
    rest = {name: value for name, value in vars(space).items() if name not in (*known, "given_model", "config")}
    return Given(given, None if config is None else Path(config), argparse.Namespace(**rest))


def search_help(parser: Parser, word: str) -> str:
    """Help of the options whose name or text has `word`."""
    formatter = parser._get_formatter()
    found = 0
    for action in _actions(parser):
        words = " ".join((*action.option_strings, action.help or ""))
        if word.lower().replace("_", "-") in words.lower() and action.help != argparse.SUPPRESS:
            formatter.add_argument(action)
            found += 1
    if found:
        return formatter.format_help()
    near = difflib.get_close_matches(word, [name.strip("-") for name in _names(parser)], n=3, cutoff=0.5)
    return f"No option mentions {word!r}." + (f" Similar options: {', '.join(near)}.\n" if near else "\n")


def check_places(rest: Mapping[str, Any], *names: str, folder: bool = False) -> None:
    """Raise ConfigError for an option whose file (or folder) cannot be written, before the work whose result it takes. A file is
    replaced; a folder that holds anything is not touched."""
    for name in names:
        if not (given := rest.get(name)):
            continue
        place = Path(given).absolute()
        above = place if folder else place.parent
        while folder and not above.exists():
            above = above.parent
        flag = f"--{name.replace('_', '-')} {given}"
        if not folder and place.is_dir():
            raise ConfigError(f"{flag} is a folder: give the name of a file.", param=name)
        if folder and place.is_dir() and os.access(place, os.R_OK) and any(place.iterdir()):
            raise ConfigError(f"{flag} is not empty: give a folder that does not exist yet.", param=name)
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise ConfigError(f"{flag} cannot be written: {above} is not a writable folder.", param=name)


def _dashed(word: str) -> str:
    """`--max_model_len=4` as `--max-model-len=4`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _names(parser: Parser) -> list[str]:
    return [name for action in _actions(parser) for name in action.option_strings]


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's actions and those of its subcommands, each option once."""
    found: dict[tuple[str, ...], argparse.Action] = {}
    for action in parser._actions:
        found[(*action.option_strings, action.dest)] = action
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                found.update({(*inner.option_strings, inner.dest): inner for inner in _actions(one)})
    return list(found.values())


def _unknown(parser: Parser, word: str) -> ConfigError:
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, _names(parser), n=1)
    hint = f"did you mean {near[0]}?" if near else f"`{parser.prog} --help` lists the options."
    what = "option" if name.startswith("-") else "argument"
    return ConfigError(f"Unknown {what} {name!r}: {hint}")


def _default_words(default: Any) -> str:
    if default is None or default == "":
        return ""
    return f" (default: {default})"


def _model_help() -> str:
    return next(str(field.metadata["help"]) for field in fields(ModelConfig) if field.name == "model")


def add_sampling(parser: Parser, names: Sequence[str] = SAMPLING) -> None:
    """Flags for fields of SamplingParams."""
    group = parser.add_argument_group("sampling options")
    types = get_type_hints(SamplingParams)
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        if name == "stop":
            group.add_argument(flag, action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
        else:
            number = finite if types[name] is float else whole
            group.add_argument(flag, type=number, metavar="X" if number is finite else "N")


def read_sampling(given: Given) -> dict[str, Any]:
    """Values of the sampling flags that were given, as SamplingParams takes them."""
    found = {name: getattr(given.rest, name) for name in SAMPLING if hasattr(given.rest, name)}
    if "stop" in found:
        found["stop"] = tuple(found["stop"])
    return found

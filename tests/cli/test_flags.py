"""Flags are the configuration's fields, with the other names users know, and mistakes end with a hint."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from ridgeline.cli.flags import (
    Arguments,
    _actions,
    add_sampling,
    check_output_paths,
    parser_for,
    read_flags,
    read_sampling,
    search_help,
)
from ridgeline.cli.foreign import FOREIGN
from ridgeline.cli.main import COMMANDS, main
from ridgeline.cli.option_groups import GROUPS
from ridgeline.cli.serve import SHIPPED_NAME, resolve_arguments
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import CONFIGS, option_fields, option_types, resolve
from ridgeline.core.sampling import SamplingParams


def read(*words: str) -> Arguments:
    return read_flags(parser_for("serve", "", CONFIGS), words)


def test_every_option_has_its_flag() -> None:
    text = parser_for("serve", "", CONFIGS).format_help()
    for name, field in option_fields().items():
        assert f"--{name.replace('_', '-')}" in text
        assert all(flag in text for flag in field.metadata["flags"])


def test_every_option_of_a_server_is_in_one_group_of_the_help() -> None:
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(grouped) == sorted(option_fields())


def test_help_is_short_where_it_can_be() -> None:
    """One line of usage; a default is said once, and not that a switch is off."""
    text = parser_for("serve", "", CONFIGS).format_help()
    assert text.startswith("usage: ridgeline serve [MODEL] [options]\n\n")
    assert not re.search(r"\(default:[^()]*\)\s+\(default:", text) and "(default: False)" not in text
    assert re.search(r"--seed N .*?\(default:\s+0\)", text, re.DOTALL)


def test_only_what_was_typed_is_given() -> None:
    assert read().flags == {}
    given = read("some/model", "--max_model_len=8K", "--no-enable-prefix-caching", "--port", "0")
    assert given.flags == {
        "model": "some/model",
        "max_model_len": "8K",
        "enable_prefix_caching": False,
        "port": "0",
    }
    assert resolve(given.flags).model.max_model_len == 8192


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-c", "512"], "max_model_len", "512"),
        (["--context-length", "512"], "max_model_len", "512"),
        (["-np", "4"], "max_num_seqs", "4"),
        (["--mem-fraction-static", "0.5"], "gpu_memory_utilization", "0.5"),
        (["-m", "x"], "model", "x"),
        (["--model-path", "x"], "model", "x"),
        (["--model", "x"], "model", "x"),
    ],
)
def test_other_names(words: list[str], name: str, value: str) -> None:
    assert read(*words).flags == {name: value}


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="did you mean --max-num-seqs"):
        read("--max-num-seq=3")
    with pytest.raises(ConfigError, match="Two models are given"):
        read("a", "--model", "b")
    with pytest.raises(ConfigError, match="expected one argument"):
        read("--port")


OWN = {
    "calc": {"max_loras", "max_lora_rank", "tensor_parallel_size"},
    "bench": {"model", "api_key", "seed", "slo", "host", "port"},
    "compare": {"dtype", "quantization"},
    "roofline": {"calibration"},
    "compress": {"device"},
    "ladder": {"dtype"},
    "plan": {"slo"},
    "simulate": {"slo", "keep_slo"},
}
"""Options of a command's own that have a configuration's name, and are read where that puts them (Arguments.flags)."""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_has_an_option_that_is_taken_for_a_configuration(name: str) -> None:
    """As `compress --calibration TEXTS` once was, which then nobody read."""
    parser = import_module(f"ridgeline.cli.{name.replace('-', '_')}").parser()
    derived = {
        action.dest for group in parser._action_groups if group.title in GROUPS for action in group._group_actions
    }
    assert {action.dest for action in _actions(parser)} & set(option_types()) - derived <= set(OWN.get(name, ()))


def test_adapters_may_be_given_one_by_one() -> None:
    given = read("some/model", "--lora", "a=x", "--lora-modules", "b=y,c=z")
    assert given.flags == {"model": "some/model", "lora_modules": "a=x,b=y,c=z"}
    for wrong in ("a", "a=", "a=x,a=y"):
        with pytest.raises(ConfigError, match="--lora-modules"):
            resolve({"lora_modules": wrong})


def test_file_and_rest() -> None:
    parser = parser_for("fit", "", CONFIGS)
    parser.add_argument("--on")
    given = read_flags(parser, ["--config", "a.toml", "--on", "H100"])
    assert given.config == Path("a.toml") and given.options.on == "H100" and given.flags == {}


def test_options_of_other_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """What they ask for is so anyway, and is said; or it is not, and is refused."""
    words = ["--trust_remote_code", "--swap-space", "4"]
    words += ["--enable-chunked-prefill", "--tool-call-parser", "hermes", "some/model", "--max-model-len", "5"]
    given = read_flags(parser_for("serve", "", CONFIGS), words)
    assert given.flags == {"model": "some/model", "max_model_len": "5", "tool_call_parser": "hermes"}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all(line.startswith("ridgeline: -") for line in said)
    assert "ridgeline: --trust-remote-code is not needed: code in a model folder is never executed" in said[0]
    for name, option in FOREIGN.items():
        asks = [name] if option.values == () else [name, "8" if option.values is None else option.values[0]]
        if option.accepted:
            assert not read_flags(parser_for("serve", "", CONFIGS), asks).flags
        others = [[name, "17"]] if option.values else [] if option.accepted else [asks]
        for words in others:
            with pytest.raises(ConfigError, match=f"^{name}.* is not supported: {option.reason}"):
                read_flags(parser_for("serve", "", CONFIGS), words)
    parser = parser_for("bench", "", ())
    parser.add_argument("--dp")
    assert read_flags(parser, ["--dp", "3"]).options.dp == "3"
    with pytest.raises(ConfigError, match="Unknown option '--swap-space'"):
        read_flags(parser, ["--swap-space", "3"])


def test_no_option_here_is_foreign() -> None:
    for name in COMMANDS:
        parser = import_module(f"ridgeline.cli.{name.replace('-', '_')}").parser()
        options = {word for action in _actions(parser) for word in action.option_strings}
        assert not set(FOREIGN) & options


def test_the_shipped_model_has_a_name() -> None:
    assert resolve_arguments(read()).service.served_model_name == SHIPPED_NAME
    assert resolve_arguments(read("--served-model-name", "mine")).service.served_model_name == "mine"
    assert resolve_arguments(read("some/model")).service.served_model_name is None


def test_sampling_flags() -> None:
    parser = parser_for("chat", "", ())
    add_sampling(parser)
    given = read_flags(
        parser, ["--temperature", "0", "--top-k", "5", "--stop", "a", "--stop", "b", "--max-tokens", "9"]
    )
    assert SamplingParams(**read_sampling(given)) == SamplingParams(
        temperature=0.0, top_k=5, stop=("a", "b"), max_tokens=9
    )


def test_help_search() -> None:
    parser = parser_for("serve", "", CONFIGS)
    shown = search_help(parser, "prefix")
    assert "--enable-prefix-caching" in shown and "--port" not in shown
    assert "Similar options: port" in search_help(parser, "prot")


def test_main_dispatch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in COMMANDS)
    assert main(["serve", "--help=prefix"]) == 0
    assert "--enable-prefix-caching" in capsys.readouterr().out
    assert main(["sevre"]) == 2
    assert "Unknown command 'sevre'. Commands are serve," in capsys.readouterr().err
    assert main(["serve", "--port", "x"]) == 2
    assert "--port is 'x': give a whole number" in capsys.readouterr().err
    assert main(["serve", "--max-queue", "-1"]) == 2
    assert "give 0 to 1073741824." in capsys.readouterr().err
    assert main(["serve", "--shadow-limit", "nan"]) == 2
    assert "--shadow-limit is 'nan': give a number" in capsys.readouterr().err
    assert main(["--version"]) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"ridgeline {name}" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_named_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("kept")
    check_output_paths({"out": str(file), "plot": str(tmp_path / "new"), "html": ""}, "out", "plot", "html", "svg")
    check_output_paths({"out": str(tmp_path / "new" / "deep")}, "out", folder=True)
    assert file.read_text() == "kept" and not (tmp_path / "new").exists()
    for given, folder in ((tmp_path, False), (tmp_path / "no" / "file", False), (file / "b", True), (file, True)):
        with pytest.raises(ConfigError, match="--save-as ") as error:
            check_output_paths({"save_as": str(given)}, "save_as", folder=folder)
        assert str(given) in error.value.message
    (tmp_path / "empty").mkdir()
    check_output_paths({"out": str(tmp_path / "empty")}, "out", folder=True)
    with pytest.raises(ConfigError, match=f"--out {tmp_path} is not empty: give a folder"):
        check_output_paths({"out": str(tmp_path)}, "out", folder=True)


@pytest.mark.parametrize("command", ["calibrate", "ladder", "compare", "roofline", "bench run"])
def test_no_command_works_for_a_result_that_has_no_place(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message would name the model, which does not exist, or the server, which nobody reaches."""
    file = tmp_path / "file"
    file.touch()
    words = {"compare": ["a", "b"], "roofline": ["--on", "h200"], "bench run": ["http://127.0.0.1:1"]}.get(command, [])
    option = "--html" if command == "roofline" else "--out"
    assert main([*command.split(), *words, option, str(file / "x.json")]) == 2
    said = capsys.readouterr().err
    assert f"{option} {file / 'x.json'} cannot be written" in said and said.count("\n") == 1

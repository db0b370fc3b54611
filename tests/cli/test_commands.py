"""Every command end to end on a tiny model with random weights."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ridgeline.cli.client import Answer, ChatClient
from ridgeline.cli.hosted import private
from ridgeline.cli.main import main
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.resolve import resolve
from ridgeline.service.address import Address

DUMMY = ("--load-format", "dummy", "--device", "cpu")


@contextmanager
def server(*words: str, **environ: str) -> Iterator[tuple[str, list[str]]]:
    """`ridgeline serve ... --port 0` as a process: its address, and the lines it printed until it was ready."""
    command = [sys.executable, "-m", "ridgeline", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ})
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip())
            if line.startswith("curl "):
                break
        match = re.search(r"ready in [\d.]+ s: (http://\S+)/v1", "\n".join(lines))
        assert match, lines
        yield match[1], lines
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(30) == 0


def run(*words: str, typed: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """A command as a process. typed: its standard input; environ: variables beside those of this process."""
    command, env = [sys.executable, "-m", "ridgeline", *words], {**os.environ, **environ}
    return subprocess.run(command, input=typed, capture_output=True, text=True, check=False, timeout=120, env=env)


def test_what_the_engine_cannot_serve_is_a_mistake_of_the_users(tiny: Path) -> None:
    """The engine's process finds out; the command says what to do and ends with 2."""
    ended = run("serve", str(tiny), *DUMMY[:-2], "--device", "cuda", "--port", "0", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 2
    assert "ridgeline: --device is cuda, but torch finds no GPU: use --device cpu." in ended.stderr


def test_a_full_disk() -> None:
    """One line; not a traceback."""
    command = [sys.executable, "-m", "ridgeline", "roofline", "--on", "h200"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (
        1,
        "ridgeline: Cannot write the output: No space left on device.\n",
    )


def test_a_terminal_of_few_letters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Another letter; not a traceback."""
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii", write_through=True))
    assert main(["roofline", "--on", "h200"]) == 0
    assert b" ?s" in screen.getvalue() and not capsys.readouterr().err


def test_serve_answers_and_says_how_it_is_configured(tiny: Path) -> None:
    """With a curl line, which is a request that works."""
    with server(str(tiny), *DUMMY, "--served-model-name", "tiny", RIDGELINE_MAX_NUM_SEQS="3") as (url, lines):
        if shutil.which("curl") is not None:
            done = subprocess.run(lines[-1] + " -s", shell=True, capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["usage"]["prompt_tokens"] > 0
        said = "\n".join(re.sub(r" +", " ", line).strip() for line in lines)
        assert "max_num_seqs 3 (environment)" in said
        assert "load_format dummy (flag)" in said
        assert "512 tokens of prompt plus answer" in said
        with urllib.request.urlopen(f"{url}/health") as health:
            assert health.status == 200
        client = ChatClient(url)
        pieces = list(client.stream([{"role": "user", "content": "Hello"}], {"max_tokens": 5, "ignore_eos": True}))
        assert "".join(pieces) == client.last.text
        assert client.last.output_tokens == 5 and client.last.finish_reason == "length"
        with pytest.raises(RidgelineError, match="400"):
            list(client.stream([{"role": "user", "content": "Hello"}], {"max_tokens": -1}))
        with urllib.request.urlopen(f"{url}/metrics") as metrics:
            assert 'ridgeline:request_success_total{engine="0"' in metrics.read().decode()


def test_what_cannot_be_listened_on_names_its_option(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words in (("--host", "203.0.113.7", "--port", "0"), ("--port", str(taken.getsockname()[1]))):
            assert main(["serve", str(tiny), *DUMMY, *words]) == 2
            assert capsys.readouterr().err.endswith(f"choose another {words[0]}.\n")


def test_a_taken_port_is_told_before_a_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The message would name the model, which does not exist."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no/such/model", "--port", port]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ridgeline: cannot listen on 127.0.0.1:{port} (") and said.endswith("another --port.\n")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("-q", "int5", "--quantization 'int5' is unknown: use fp8, w8a8, int8, int4, int3, fp8-weight"),
        ("--speculate", "magic", "--speculate: 'magic' is unknown. Use auto, reference"),
        ("--speculate", "reference:/no/such/file", "--speculate: the document /no/such/file is not a file"),
        ("--speculate", "medusa:/no/such", "--speculate: /no/such does not exist or has no config.json"),
        ("--slo", "fast", "--slo 'fast' is not a known limit: give ttft=200ms"),
        ("--batching", "static", "--batching is 'static': give continuous, static:N or dynamic:N,WINDOW_MS"),
        ("--allowed-origins", "a.example", "allowed_origins has 'a.example': give origins as https://"),
        ("--metrics-alias", "tgi", "--metrics-alias is 'tgi': give one of"),
        ("--dtype", "int3", "--dtype is 'int3': give one of auto"),
        ("--load-format", "gguf", "--load-format is 'gguf': give one of auto, dummy"),
        ("--engine-restarts", "-1", "--engine-restarts is '-1': give 0 to"),
    ],
)
def test_a_bad_option_is_told_before_anything_loads(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message would name the port, which is taken, or the model, which does not exist."""
    option = f"{flag}={value}" if flag.startswith("--") else f"{flag}{value}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "no/such/model", "--port", str(taken.getsockname()[1]), option]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ridgeline: {message}") and said.count("\n") == 1


def test_options_are_checked_without_torch() -> None:
    """Nor is the service's part imported, for which the engine would wait."""
    program = (
        "import sys; from ridgeline.cli.main import main; "
        "status = main(['serve', '-q', 'int4', '--speculate', 'magic']); "
        "print(sorted({'torch', 'aiohttp'} & set(sys.modules))); sys.exit(status)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "[]\n"), ended.stderr


def test_a_server_for_this_machine_alone_speaks_plain_http() -> None:
    """Whatever the environment says of the server that others use."""
    flags = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_keyfile_password": "a", "root_path": "/llm"}
    address = Address.read(private(resolve({**flags, "host": "0.0.0.0", "api_key": "b"})).service)
    assert (address.url(80), address.tls) == ("http://127.0.0.1:80", None)
    keys = {"api_key": "a", "admin_api_key": "b", "api_keys": "keys.yaml"}
    service = private(resolve(keys)).service
    assert (service.api_key, service.admin_api_key, service.api_keys) == (None, None, "")


def test_files_of_tls_are_read_before_anything_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such/model", *DUMMY, "--ssl-certfile", "/nowhere/cert.pem"]) == 2
    assert "ssl_certfile: /nowhere/cert.pem cannot be read (No such file or directory)" in capsys.readouterr().err


def test_chat(tiny: Path) -> None:
    typed = "Hello\n\nAgain\n/clear\nAfresh\n/exit\nnever\n"
    ended = run("chat", str(tiny), *DUMMY, "--max-tokens", "4", typed=typed)
    assert ended.returncode == 0 and ended.stderr.count("TTFT") == 3 and "tokens/s" in ended.stderr
    asked = [int(count) for count in re.findall(r"(\d+) tokens in \(", ended.stderr)]
    assert asked[1] > asked[0] and asked[2] < asked[1]  # the second has the first before it, the third nothing


def test_chat_without_a_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "Cannot reach http://127.0.0.1:1: connection refused." in capsys.readouterr().err
    for words, message in (
        (("--url", "http://x:port"), "not the address of a server"),
        (
            ("--url", "http://127.0.0.1:1", "--max-num-seqs", "3"),
            "max_num_seqs configures a server that this command starts",
        ),
        (("--url", "http://127.0.0.1:1", "MODEL"), "model configures a server that this command starts"),
        (("--api-key", "secret"), "--url"),
    ):
        assert main(["chat", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not the address"):
        list(ChatClient("ftp://x").stream([], {}))


def test_generate(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffdef\r\n\ngh\u2028i\n", encoding="utf-8")
    words = ["generate", str(tiny), *DUMMY, "-p", "abc", "--file", str(file), "--max-tokens", "6", "--json"]
    assert main([*words, "--temperature", "0"]) == 0
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.strip().split("\n")]
    assert [row["prompt"] for row in rows] == ["abc", "def", "gh\u2028i"]
    assert all(1 <= row["choices"][0]["tokens"] <= 6 for row in rows)
    assert "tokens/s" in said.err
    assert main(["generate", str(tiny), *DUMMY, "--file", str(tmp_path / "none")]) == 2
    file.write_bytes(b"abc\xff\n")
    assert main(["generate", str(tiny), *DUMMY, "--file", str(file)]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err
    assert main(["generate", str(tiny), *DUMMY, "-p", "a", "--revision", "main"]) == 2
    assert "is a folder: leave it out" in capsys.readouterr().err
    (tmp_path / "options.json").write_bytes(b"\xff")
    assert main(["generate", str(tiny), *DUMMY, "-p", "a", "--config", str(tmp_path / "options.json")]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_generate_says_which_prompts_cannot_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tiny), *DUMMY, "-p", "abc", "-p", "x" * 3000, "--max-tokens", "2", "--json"]
    assert main(words) == 1
    said = capsys.readouterr()
    good, bad = (json.loads(line)["choices"][0] for line in said.out.splitlines())
    assert good["finish_reason"] == "length" and "error" not in good
    assert bad["finish_reason"] == "refused" and "3000 tokens" in bad["error"] and bad["error"] in said.err


def test_mistakes_have_one_line_and_status_2(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny), *DUMMY, "-p", "abc", "--temperature", "-1"]) == 2
    assert capsys.readouterr().err == "ridgeline: temperature is -1.0: give a number at least 0 and at most 100.\n"

    long = tmp_path / ("x" * 300)
    assert main(["roofline", "--on", "h200", "--svg", str(long)]) == 2
    assert capsys.readouterr().err == f"ridgeline: {long}: File name too long.\n"


def test_fit(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(tiny), "--on", "H200", "--max-model-len", "256"]) == 0
    said = capsys.readouterr().out
    assert "fits" in said and f"ridgeline serve {tiny} --max-model-len 256" in said
    assert "uncalibrated" in said and "sequences of 256 tokens" in said
    assert main(["fit", str(tiny), "--memory", "1M"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["fit", str(tiny), "--on", "abacus"]) == 2


def test_fit_names_no_command_that_cannot_work(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["fit", str(tiny), "--device", "cuda"]) == 2
    said = capsys.readouterr()
    assert "this machine has no GPU" in said.err and "fits" not in said.out
    assert main(["fit", str(tiny), "--device", "cuda", "--on", "H100"]) == 0


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_API_KEY", "secret")
    assert main(["collect-env"]) == 0
    said = capsys.readouterr().out
    assert "torch" in said and "memory" in said and "secret" not in said
    assert re.search(r"RIDGELINE_API_KEY +\*\*\*", said)


def test_speed_counts_tokens_after_the_first() -> None:
    answer = Answer(output_tokens=11, ttft_s=0.5, total_s=1.5)
    assert answer.tokens_per_s == 10.0
    assert Answer(output_tokens=1, ttft_s=0.5, total_s=0.5).tokens_per_s is None


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m ridgeline collect-env | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.startswith("python") and "Traceback" not in done.stderr

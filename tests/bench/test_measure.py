"""Whole measurements over real sockets: against the mock, and against our own service."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ridgeline.bench.figures import agent_runs
from ridgeline.bench.folder import save
from ridgeline.bench.mock import MockServer, Speed
from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.record import Run, read_run
from ridgeline.bench.report import Outcome
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.bench.show import run_table
from ridgeline.cli.main import main
from ridgeline.core.errors import ConfigError, RidgelineError

from ..service.conftest import THINKING
from ..service.live import MODEL, behaviour, counts, live, says

FAST = Speed(ttft_s=0.002, itl_s=0.001)
SMALL = WorkloadConfig(input_len="5-20", output_len="1-6", max_requests=8)


def measured(asked: BenchConfig, url: str) -> Run:
    async def work() -> Run:
        async with Session(asked, url) as session:
            return await session.measure()

    return asyncio.run(work())


async def against_mock(asked: BenchConfig, speed: Speed = FAST) -> Run:
    async with MockServer(speed) as server, Session(asked, server.url) as session:
        return await session.measure()


@contextmanager
def mock(speed: Speed = FAST) -> Iterator[str]:
    """A mock in a thread of its own, for what runs a loop itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = MockServer(speed)
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("load", [LoadConfig(rate=200.0), LoadConfig(concurrency=3, warmup=2)])
def test_every_token_is_counted(endpoint: str, load: LoadConfig) -> None:
    run = asyncio.run(against_mock(BenchConfig(TargetConfig(endpoint=endpoint), SMALL, load)))
    assert [row.error for row in run.rows] == [""] * 8
    assert [row.output_tokens for row in run.rows] == [row.asked_output for row in run.rows]
    assert [row.input_tokens for row in run.rows] == [row.asked_input for row in run.rows]  # a template's tokens too
    assert [sum(row.counts) for row in run.rows] == [row.output_tokens for row in run.rows]
    assert {row.counted for row in run.rows} == {"server"}
    assert all(row.ttft_s is not None and row.ttft_s >= FAST.ttft_s for row in run.rows)
    assert run.facts["model"] == "mock" and run.facts["chat"] == (endpoint == "chat")


def test_progress_is_reported_from_the_warm_up_on() -> None:
    """Its first report comes before the warm-up request has an answer."""
    slow, reports = Speed(ttft_s=1.0, itl_s=0.001), list[tuple[float, int, int]]()
    asked = BenchConfig(workload=replace(SMALL, max_requests=1), load=LoadConfig(concurrency=1, warmup=1))

    def report(done: int, total: int) -> None:
        reports.append((time.perf_counter(), done, total))

    async def work() -> float:
        async with MockServer(FAST) as server, Session(asked, server.url, report) as session:
            server.speed = slow
            began = time.perf_counter()
            await session.measure()
            return began

    began = asyncio.run(work())
    at, done, total = reports[0]
    assert (done, total) == (0, 1) and at - began < slow.ttft_s


def test_several_tokens_per_chunk() -> None:
    work = replace(SMALL, output_len="10")
    run = asyncio.run(against_mock(BenchConfig(workload=work), replace(FAST, per_chunk=4)))
    assert {row.output_tokens for row in run.rows} == {10}
    assert all(sum(row.counts) == 10 and row.counts[0] >= 4 for row in run.rows)


def test_errors_are_counted_and_never_repeated() -> None:
    async def work() -> Run:
        async with MockServer(FAST) as server, Session(BenchConfig(workload=SMALL), server.url) as session:
            server.speed = replace(FAST, failing=1.0)
            return await session.measure()

    run = asyncio.run(work())
    assert {row.error for row in run.rows} == {"HTTP 500: The mock server fails this request (--failing)."}
    assert len(run.rows) == 8 and run.attainment == 0.0


def test_a_request_that_takes_too_long_ends() -> None:
    asked = BenchConfig(TargetConfig(timeout_s=0.3), replace(SMALL, output_len="2000", max_requests=2))
    run = asyncio.run(against_mock(asked))
    assert {row.error for row in run.rows} == {"no complete answer within 0.3 s"}
    assert all(row.first_s is not None for row in run.rows)


def test_server_and_client_agree_on_publish_and_on_agent_runs(tmp_path: Path) -> None:
    """A model that reasons first, asked in conversations of two turns."""
    talk = [("human", "Where?"), ("gpt", "In Rome, at noon."), ("human", "And then?"), ("gpt", "To the sea.")]
    rows = [{"conversations": [{"from": role, "value": text} for role, text in talk]}] * 2
    trace = tmp_path / "talk.json"
    trace.write_text(json.dumps(rows), encoding="utf-8")
    asked = BenchConfig(
        TargetConfig(endpoint="chat", ignore_eos=False, extra_body='{"max_tokens": 64}'),
        WorkloadConfig(trace=str(trace), run_ids=True),
        LoadConfig(concurrency=1),
        ResultConfig(slo="publish=1ms"),
    )
    with live(behaviour(says("<think>hm, hm</think>Yes."), delay=0.02), chat_template=THINKING) as server:
        run = measured(asked, f"http://127.0.0.1:{server.port}")
        assert [row.error for row in run.rows] == [""] * 4 and run.attainment == 0.0
        for row in run.rows:
            record = server.get(f"/requests/{row.answer_id}").json
            assert row.publish_s - row.ttft_s == pytest.approx(record["publish_s"] - record["ttft_s"], abs=0.03)
            assert row.publish_s - row.ttft_s > 0.1 and record["run_id"] == row.run_id
        for run_id in {row.run_id for row in run.rows}:
            first, last = (row for row in run.rows if row.run_id == run_id)
            seen = server.get(f"/runs/{run_id}").json
            assert (seen["calls"], seen["output_tokens"]) == (2, first.output_tokens + last.output_tokens)
            assert seen["publish_s"] == pytest.approx(last.scheduled_s + last.publish_s - first.scheduled_s, abs=0.1)
    assert agent_runs(run).completed == 2
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(run_table(run))
    text = console.export_text()
    assert "PUBLISH" in text and "2 offered, 2 completed, 2 requests each, time to publish" in text


def test_run_ids_need_conversations() -> None:
    with pytest.raises(ConfigError, match="--run-ids needs conversations") as error:
        Session(BenchConfig(workload=replace(SMALL, run_ids=True)))
    assert error.value.param == "run_ids"


def test_the_same_seed_sends_the_same_bytes() -> None:
    def bodies(seed: int) -> list[bytes]:
        heard: list[bytes] = []

        async def work() -> None:
            asked = BenchConfig(workload=replace(SMALL, seed=seed))
            async with MockServer(FAST) as server, Session(asked, server.url) as session:
                send = session.client.send

                async def listening(data: bytes) -> object:
                    if data.startswith(b"POST"):
                        heard.append(data.partition(b"\r\n\r\n")[2])
                    return await send(data)

                session.client.send = listening  # type: ignore[assignment,method-assign]
                await session.measure()

        asyncio.run(work())
        return heard

    first = bodies(1)
    assert len(first) == 8 and first == bodies(1) != bodies(2)


def test_a_context_that_is_too_small_drops() -> None:
    asked = BenchConfig(workload=replace(SMALL, input_len="5-60", output_len="5", max_requests=40))
    run = asyncio.run(against_mock(asked, replace(FAST, context=40)))
    assert run.dropped > 0 and len(run.rows) + run.dropped == 40
    assert max(row.asked_input for row in run.rows) <= 35


@pytest.mark.parametrize(("endpoint", "prompts"), [("completions", "ids"), ("completions", "text"), ("chat", "text")])
def test_our_own_server(endpoint: str, prompts: str) -> None:
    asked = BenchConfig(
        TargetConfig(endpoint=endpoint, prompts=prompts),
        WorkloadConfig(input_len="150-250", output_len="3-9", max_requests=6),
        LoadConfig(rate=100.0),
        ResultConfig(slo="ttft=30s"),
    )
    with live(behaviour(counts)) as server:
        run = measured(asked, f"http://127.0.0.1:{server.port}")
    assert [row.error for row in run.rows] == [""] * 6
    assert [row.output_tokens for row in run.rows] == [row.asked_output for row in run.rows]
    for row in run.rows:
        assert (
            row.input_tokens == row.asked_input
            if prompts == "ids"
            else abs(row.input_tokens / row.asked_input - 1) < 0.2
        )
    assert run.facts["model"] == MODEL and run.facts["context"] == 2048
    assert run.attainment == 1.0


def test_equal_blocks_hit_our_prefix_cache() -> None:
    with live(behaviour(counts)) as server:
        url = f"http://127.0.0.1:{server.port}"
        run = measured(
            BenchConfig(TargetConfig(), replace(SMALL, input_len="64", prefix_len=48), LoadConfig(concurrency=1)), url
        )
    assert sum(row.cached_tokens for row in run.rows) > 0


def test_what_cannot_be_measured_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="is the server running"):
        measured(BenchConfig(workload=SMALL), "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="not the address of a server"):
        measured(BenchConfig(workload=SMALL), "ftp://x")
    with live(behaviour(counts), api_key="secret") as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(ConfigError, match="--api-key"):
            measured(BenchConfig(workload=SMALL), url)
        with pytest.raises(ConfigError, match="--model is 'other', but the server serves"):
            measured(BenchConfig(TargetConfig(api_key="secret", model="other"), SMALL), url)
        with pytest.raises(RidgelineError, match="temperature"):
            measured(BenchConfig(TargetConfig(api_key="secret", extra_body='{"temperature": -1}'), SMALL), url)
        assert len(measured(BenchConfig(TargetConfig(api_key="secret"), SMALL), url).completed) == 8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TargetConfig(extra_body="[1]"), "--extra-body is not a JSON object"),
        (TargetConfig(endpoint="x"), "endpoint is 'x': give completions or chat"),
        (TargetConfig(endpoint="chat", prompts="ids"), "--endpoint chat does not accept token ids"),
    ],
)
def test_contradictions_are_refused(config: TargetConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Session(BenchConfig(config))
    with pytest.raises(ConfigError, match="concurrency is 0"):
        BenchConfig(load=LoadConfig(concurrency=0))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--burstiness", "2"), "give --rate too"),
        (("--time-scale", "2"), "--time-scale applies to the times of a trace"),
        (("--input-len", "64-99", "--prefix-len", "65"), "--prefix-len is 65, which exceeds --input-len 64-99"),
        (("--url", "http://other"), "leave --url out"),
        (("--max-requests", "0"), "give 1 to 16,777,216"),
        (("--trace", "{trace}", "--output-len", "5"), "--output-len applies to random requests"),
    ],
)
def test_options_that_nobody_would_read_are_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,8,2\n")
    with mock() as url:
        out = str(tmp_path / "out")
        assert main(["bench", "run", url, "--out", out, *(word.format(trace=trace) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mock", "--ttft-ms", "-1"), "must be finite: give"),
        (("mock", "--itl-ms", "inf"), "must be finite: give"),
        (("policies", "--policies", ""), "policies is empty"),
        (("sweep", "http://127.0.0.1:1", "--rates", "1,2", "--rate", "5"), "leave one of them out"),
        (("curve", "http://127.0.0.1:1", "--concurrency", "5"), "leave --concurrency out"),
        (("curve", "http://127.0.0.1:1", "--rate", "5"), "leave --rate out"),
        (("policies", "--url", "http://a"), "leave --url out"),
        (("trace", "x", "--slo", "ttft=1s"), "--slo applies to runs"),
    ],
)
def test_what_an_action_cannot_follow_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_an_answer_is_not_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "2", "--num-prompts", "2", "--timeout-s", "0.3"]
    with mock() as url:
        main(["bench", "run", url, *load, "--output-len", "2", "--out", str(tmp_path / "answered")])
        assert "no request was answered" not in capsys.readouterr().err
        assert main(["bench", "run", url, *load, "--output-len", "2000", "--out", str(tmp_path / "silent")]) == 1
    assert "no request was answered" in capsys.readouterr().err


def test_ctrl_c_reports_what_was_measured(tmp_path: Path) -> None:
    """And without a terminal a line says how far it is."""
    with mock(Speed(ttft_s=0.002, itl_s=0.02)) as url:
        words = ["bench", "run", url, "--concurrency", "1", "--output-len", "5", "--out", str(tmp_path / "run")]
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell may have it ignored
        code += "from ridgeline.bench import progress; progress.LINE_S = 0.2; from ridgeline.cli.main import main; "
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        assert " of 200 requests have ended" in process.stderr.readline()
        assert " of 200 requests have ended" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "report: " in errors, errors
    assert "interrupted after" in " ".join(output.split())
    assert 0 < len(read_run(tmp_path / "run").rows) < 200


# --- the command line ---------------------------------------------------------------------------------------------------


def test_run_writes_its_files_and_a_page_that_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with mock() as url:
        words = [
            url,
            "--rate",
            "100",
            "--num-prompts",
            "12",
            "--output-len",
            "5",
            "--slo",
            "ttft=10s",
            "--out",
            str(out),
        ]
        main(["bench", "run", *words])
    assert "12 offered, 12 completed" in " ".join(capsys.readouterr().out.split())
    assert main(["bench", "run", "http://127.0.0.1:1", "--out", str(out)]) == 2
    assert f"--out {out} is not empty" in capsys.readouterr().err and len(read_run(out).rows) == 12
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 4 and "limit 10 s" in page
    assert not any(word in page for word in ("src=", "href=", "@import", "url("))


def test_sweep_search_and_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--num-prompts", "12", "--output-len", "5", "--slo", "ttft=10s", "--json"]
    with mock() as url:
        main(["bench", "sweep", url, "--rates", "100,200", *common, "--out", str(tmp_path / "sweep")])
        swept = msgspec.json.decode(capsys.readouterr().out)
        known = ["--on", "h200", "--model-folder", "shipped"]
        main(["bench", "curve", url, "--levels", "1,2", *common, *known, "--out", str(tmp_path / "curve")])
        curve = msgspec.json.decode(capsys.readouterr().out)
        assert main(["bench", "search", url, "--num-prompts", "3"]) == 2
    assert "--slo" in capsys.readouterr().err
    assert [run["request_rate"] for run in swept["runs"]][:1] == [100.0]
    assert (tmp_path / "sweep" / "01" / "requests.jsonl").is_file()
    # On a busy machine the client may be late, which ends a sweep after its first run.
    report = (tmp_path / "sweep" / "report.html").read_text()
    assert len(swept["runs"]) == 1 or "Goodput against offered rate" in report
    assert [point["concurrency"] for point in curve["points"]] == [1, 2]
    assert all(0 < point["mfu"] < 1 and 0 < point["mbu"] < 1 for point in curve["points"])


def test_compare_two_servers_and_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "2", "--num-prompts", "8", "--output-len", "8", "--json"]
    with mock() as url, mock(replace(FAST, ttft_s=0.2)) as slow:
        main(["bench", "compare", url, slow, *load, "--out", str(tmp_path / "both")])
    comparison = msgspec.json.decode(capsys.readouterr().out)
    changes = {difference["measure"]: difference for difference in comparison["differences"]}
    assert changes["TTFT median"]["second_is"] == "worse"
    assert changes["output tokens per request"]["second_is"] == "same"
    folders = [str(tmp_path / "both" / number) for number in ("01", "02")]
    main(["bench", "compare", *folders, "--out", str(tmp_path / "again")])
    assert "pair by pair" in capsys.readouterr().out


def test_a_sweep_of_one_rate_is_a_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock() as url:
        main(["bench", "sweep", url, "--rates", "50", "--num-prompts", "4", "--json", "--out", str(tmp_path)])
    swept = msgspec.json.decode(capsys.readouterr().out)
    assert [run["request_rate"] for run in swept["runs"]] == [50.0]
    assert (tmp_path / "01" / "requests.jsonl").is_file() and (tmp_path / "summary.json").is_file()


def test_trace_and_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[1] / "data" / "traces" / "mooncake.jsonl"
    assert main(["bench", "trace", str(file)]) == 0
    assert "endless cache tokens" in capsys.readouterr().out
    assert main(["bench", "run", "--rat", "5"]) == 2
    assert "did you mean --rate?" in capsys.readouterr().err
    assert main(["bench", "--help=goodput"]) == 0
    assert "--slo" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    run = asyncio.run(against_mock(BenchConfig(workload=SMALL)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Cannot write the results to --out"):
        save(Outcome("x", [run], single=True), str(tmp_path / "file"))


@pytest.mark.long
def test_policies_start_a_server_for_each(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rate", "50", "--num-prompts", "4", "--input-len", "20", "--output-len", "5", "--json"]
    options = ["--policies", "dynamic:2,20 continuous", "--serve", "--load-format dummy --device cpu --threads 1"]
    main(["bench", "policies", str(tiny), *options, *load, "--out", str(tmp_path / "policies")])
    summary = msgspec.json.decode(capsys.readouterr().out)
    assert [(run["name"], run["completed"]) for run in summary["runs"]] == [("dynamic:2,20", 4), ("continuous", 4)]


def test_a_server_that_does_not_come_up_says_why() -> None:
    async def work() -> None:
        async with serving(["--batching", "nonsense"]):
            raise AssertionError

    with pytest.raises(RidgelineError, match="did not start(.|\n)*give continuous"):
        asyncio.run(work())

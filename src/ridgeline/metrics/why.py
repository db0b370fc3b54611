"""Explanation of a request's latency: the missed limit, the phase to blame, and the server's load meanwhile."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.core.slo import Slo
from ridgeline.metrics.records import DISCONNECTED, RequestRecord

MIXED_SHARE = 0.3
"""Share of decoding time in steps with other requests' prompts from which the explanation names them."""
CACHE_FULL = 0.9
"""Share of used KV blocks from which the explanation mentions the cache."""
CUT_TEXTS = {
    DISCONNECTED: "Disconnected by the client",
    "refused": "Rejected",
    "drain": "Ended by the server's shutdown",
    "slow_reader": "Ended because the client read too slowly",
}
"""`RequestRecord.cut` in words. All other values are failures."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Medians of the last minutes, in seconds. NaN without data."""

    queue_s: float
    prefill_s: float
    tpot_s: float


def verdict(record: RequestRecord, slo: Slo) -> str:
    """Return "good", the first missed limit with both numbers, or why the request was cut off (`RequestRecord.cut`).

    A disconnect is not a miss. If the request missed a limit before the client disconnected, the limit is returned.
    """
    if record.cut and record.cut != DISCONNECTED:
        return record.cut
    return _missed(record, slo) or record.cut or "good"


def _missed(record: RequestRecord, slo: Slo) -> str:
    """Return the first limit that the request misses, or "".

    A time that a request had not reached when it was cut off (TTFT, publish) counts as its lifetime.
    """
    latencies = record.latencies
    if record.cut:
        waits = {name: getattr(latencies, name) or record.e2e_s for name in ("ttft", "publish")}
        latencies = latencies._replace(**waits)
    return slo.verdict(latencies)


def blame(record: RequestRecord, slo: Slo) -> str:
    """Return the cause of a miss: "error", "queue", "prefill", "decode" or "client". "" without a miss."""
    if record.cut and record.cut != DISCONNECTED:
        return "error"
    missed = _missed(record, slo).split(" ")[0]
    if not missed:
        return ""
    spent = record.spent
    if record.cut and record.ttft_s is None:  # the engine reports a request's times with its first token
        return "queue" if record.arrival.waiting else "prefill"
    if missed == "ttft":
        return "queue" if spent.queue_s >= spent.prefill_s else "prefill"
    if missed == "tpot":
        return "decode"
    if missed == "publish":  # of its parts, only hidden tokens are decoding
        published = record.e2e_s if record.publish_s is None else record.publish_s
        hidden = {"queue": spent.queue_s, "prefill": spent.prefill_s, "decode": published - (record.ttft_s or 0.0)}
        return max(hidden, key=lambda name: hidden[name])
    parts = {
        "queue": spent.queue_s,
        "prefill": spent.prefill_s,
        "decode": spent.decode_s,
        "client": record.elsewhere_s,
    }
    return max(parts, key=lambda name: parts[name])


def why(record: RequestRecord, slo: Slo, typical: Typical) -> dict[str, Any]:
    """Build the response of GET /requests/{id}/why: `summary` (a sentence), `reasons` (sentences, the largest time first) and
    `numbers`."""
    parts = sorted(_parts(record, typical), key=lambda part: -part[0])
    judgement = verdict(record, slo)
    return {
        "id": record.id,
        "request_id": record.request_id,
        "summary": _summary(record, slo, judgement),
        "verdict": judgement,
        "blame": blame(record, slo),
        "reasons": [text for seconds, text in parts if seconds > 0.01 * record.e2e_s],
        "numbers": {
            **asdict(record),
            "tpot_s": record.tpot_s,
            "elsewhere_s": record.elsewhere_s,
            "typical": asdict(typical),
            "slo": slo.limits(),
        },
    }


def _summary(record: RequestRecord, slo: Slo, judgement: str) -> str:
    took = f"{_seconds(record.e2e_s)} for {record.prompt_tokens} prompt and {record.output_tokens} output tokens"
    if judgement == "good":
        return f"{took}; all limits were met." if slo else f"{took}; no limits are declared (--slo, or x-slo- headers)."
    missed = _missed(record, slo)
    clauses = [_cut_clause(record)] if record.cut else []
    return "; ".join([took, *clauses, *([f"missed {missed}"] if missed else [])]) + "."


def _cut_clause(record: RequestRecord) -> str:
    """Describe how a cut-off request ended, in lower case and without its time."""
    words = CUT_TEXTS.get(record.cut, "Failed")
    reason = f" ({record.cut_reason})" if record.cut_reason else ""
    return words[0].lower() + words[1:] + reason


def _parts(record: RequestRecord, typical: Typical) -> list[tuple[float, str]]:
    """Return (seconds, sentence) for each part of the request's lifetime."""
    spent, arrival, computed = record.spent, record.arrival, record.prompt_tokens - record.cached_tokens
    cache_note = f", and the KV cache was {arrival.kv_used:.0%} full" if arrival.kv_used >= CACHE_FULL else ""
    queue = (
        f"The request waited {_seconds(spent.queue_s)} to be admitted{_against_usual(spent.queue_s, typical.queue_s)}. On its "
        f"arrival, {_requests(arrival.waiting)} waited and {arrival.running} ran{cache_note}."
    )
    prefill = (
        f"The first token came {_seconds(spent.prefill_s)} after admission{_against_usual(spent.prefill_s, typical.prefill_s)}. "
        f"Prompt tokens computed: {computed}, taken from the prefix cache: {record.cached_tokens}."
    )
    parts = [(spent.queue_s, queue), (spent.prefill_s, prefill), (spent.decode_s, _decode(record, typical))]
    if record.late:
        lost = sum(work.seconds for work in record.late)
        names = ", ".join(dict.fromkeys(f"{work.kind} of {work.name}" for work in record.late))
        parts.append(
            (lost, f"No step ran for {_seconds(lost)}, because of work that start-up should have done: {names}.")
        )
    if record.cut:
        return [(record.e2e_s, _cut_sentence(record)), *parts]
    outside = f"{_seconds(record.elsewhere_s)} passed outside of the engine: tokenizer, HTTP, reading by the client."
    return [*parts, (record.elsewhere_s, outside)]


def _cut_sentence(record: RequestRecord) -> str:
    """Describe how and when a cut-off request ended. A rejected one has no output to mention."""
    reason = f" ({record.cut_reason})" if record.cut_reason else ""
    text = f"{CUT_TEXTS.get(record.cut, 'Failed')} after {_seconds(record.e2e_s)}{reason}"
    if record.cut == "refused":
        return f"{text}."
    return f"{text}, " + (
        f"with {_tokens(record.output_tokens)} of output." if record.output_tokens else "before any output."
    )


def _decode(record: RequestRecord, typical: Typical) -> str:
    spent, device = record.spent, record.decoding
    pace = (
        ""
        if record.tpot_s is None
        else f", {_seconds(record.tpot_s)} per token{_against_usual(record.tpot_s, typical.tpot_s)}"
    )
    text = f"Decoding took {_seconds(spent.decode_s)}{pace}"
    if device.device_s > 0:
        text += f", {device.row_s / device.device_s:.1f} requests running on average"
        if device.mixed_s / device.device_s >= MIXED_SHARE:
            text += f", {device.mixed_s / device.device_s:.0%} of the time in steps that also computed prompts"
    if spent.preempted:
        times = _noun(spent.preempted, "time")
        text += f"; it was preempted {spent.preempted} {times}, because KV blocks were missing, and recomputed"
    if record.hidden_tokens:
        text += f"; {_tokens(record.hidden_tokens)} of the output {'was' if record.hidden_tokens == 1 else 'were'} hidden reasoning"
        if record.publish_s is None:
            text += ", and no visible content came"
        else:
            text += f", and the first visible content came {_seconds(record.publish_s)} after arrival"
    if spent.drafted:
        text += f"; {spent.accepted} of {spent.drafted} draft {_noun(spent.drafted, 'token')} accepted"
    return text + "."


def _against_usual(value: float, usual: float) -> str:
    return f" (usually {_seconds(usual)})" if usual == usual and value > 1.5 * usual else ""


def _tokens(count: int) -> str:
    return f"{count} {_noun(count, 'token')}"


def _requests(count: int) -> str:
    return f"{count} {_noun(count, 'request')}"


def _noun(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

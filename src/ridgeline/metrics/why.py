"""Why a request took as long as it did: which limit it missed, which phase is to blame, and what went on meanwhile."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.core.slo import Slo
from ridgeline.metrics.records import RequestRecord

CROWDED = 0.3
"""Share of the device time between a request's tokens from which other requests' prompts are named as the cause."""
FULL = 0.9
"""Share of KV blocks in use from which the cache counts as full."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Medians of the last minutes, in seconds; NaN where nothing was seen."""

    queue_s: float
    prefill_s: float
    tpot_s: float


def blame(record: RequestRecord, slo: Slo) -> str:
    """ "" if the request met every limit, else "error", "queue", "prefill", "decode" or "client"."""
    if record.cut:
        return "error" if record.cut != "cancelled" else "client"
    missed = slo.verdict(record.ttft_s, record.tpot_s, record.e2e_s).split(" ")[0]
    if not missed:
        return ""
    spent = record.spent
    if missed == "ttft":
        return "queue" if spent.queue_s >= spent.prefill_s else "prefill"
    if missed == "tpot":
        return "decode"
    parts = {
        "queue": spent.queue_s,
        "prefill": spent.prefill_s,
        "decode": spent.decode_s,
        "client": record.elsewhere_s,
    }
    return max(parts, key=lambda name: parts[name])


def why(record: RequestRecord, slo: Slo, typical: Typical) -> dict[str, Any]:
    """The answer of GET /requests/{id}/why: `summary` (one sentence), `reasons` (sentences, the costliest first) and the
    numbers they rest on."""
    parts = sorted(_parts(record, typical), key=lambda part: -part[0])
    verdict = _ended(record) or slo.verdict(record.ttft_s, record.tpot_s, record.e2e_s)
    told = [text for seconds, text in parts if seconds > 0.01 * record.e2e_s]
    return {
        "id": record.id,
        "summary": _summary(record, slo, verdict),
        "verdict": verdict or "good",
        "blame": blame(record, slo),
        "reasons": told,
        "numbers": {
            **asdict(record),
            "tpot_s": record.tpot_s,
            "elsewhere_s": record.elsewhere_s,
            "typical": asdict(typical),
            "slo": slo.limits(),
        },
    }


def _ended(record: RequestRecord) -> str:
    return f"ended early: {record.cut}" if record.cut else ""


def _summary(record: RequestRecord, slo: Slo, verdict: str) -> str:
    took = f"{_s(record.e2e_s)} for {record.prompt_tokens} tokens in and {record.output_tokens} out"
    if verdict:
        return f"{took}; {verdict}."
    return f"{took}; every limit met." if slo else f"{took}; no limits are declared (--slo, or x-slo- headers)."


def _parts(record: RequestRecord, typical: Typical) -> list[tuple[float, str]]:
    """(seconds, sentence) for each part of the request's life."""
    spent, found, computed = record.spent, record.arrival, record.prompt_tokens - record.cached_tokens
    full = f", and the KV cache was {found.kv_used:.0%} full" if found.kv_used >= FULL else ""
    queue = (
        f"Waited {_s(spent.queue_s)} to be admitted{_beside(spent.queue_s, typical.queue_s)}: {found.waiting} waited "
    )
    queue += f"before it and {found.running} ran{full}."
    prefill = (
        f"First token {_s(spent.prefill_s)} after admission{_beside(spent.prefill_s, typical.prefill_s)}: {computed} "
    )
    prefill += f"prompt tokens computed, {record.cached_tokens} taken from the prefix cache."
    parts = [(spent.queue_s, queue), (spent.prefill_s, prefill), (spent.decode_s, _decode(record, typical))]
    if record.late:
        lost = sum(one.seconds for one in record.late)
        names = ", ".join(dict.fromkeys(f"{one.kind} of {one.name}" for one in record.late))
        parts.append((lost, f"{_s(lost)} in which no step could begin, for what start-up should have done: {names}."))
    if record.cut:
        return [
            (record.e2e_s, f"Ended after {_s(record.e2e_s)} ({record.cut}), {record.output_tokens} tokens out."),
            *parts,
        ]
    outside = f"{_s(record.elsewhere_s)} outside of the engine: text, HTTP, the client's reading."
    return [*parts, (record.elsewhere_s, outside)]


def _decode(record: RequestRecord, typical: Typical) -> str:
    spent, around = record.spent, record.decoding
    pace = "" if record.tpot_s is None else f", {_s(record.tpot_s)} per token{_beside(record.tpot_s, typical.tpot_s)}"
    text = f"Decoding took {_s(spent.decode_s)}{pace}"
    if around.device_s > 0:
        text += f", {around.row_s / around.device_s:.1f} requests running on average"
        if around.mixed_s / around.device_s >= CROWDED:
            text += f", {around.mixed_s / around.device_s:.0%} of it in steps that also computed prompts"
    if spent.preempted:
        text += f"; preempted {spent.preempted} times for want of KV blocks and computed again"
    if record.hidden_tokens:
        text += f"; {record.hidden_tokens} of its tokens were hidden thoughts"
    if spent.drafted:
        text += f"; {spent.accepted} of {spent.drafted} drafted tokens were kept"
    return text + "."


def _beside(value: float, usual: float) -> str:
    return f" (usually {_s(usual)})" if usual == usual and value > 1.5 * usual else ""


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

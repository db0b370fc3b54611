"""Predicted beside measured step times: `python benchmarks/prediction.py --out benchmarks/results/prediction.json`.

For each model folder (a config.json is enough; weights are random) the cost model is fitted on one set of steps and
judged on another, of compositions the fit has not seen; both are measured in turns, since a machine's speed drifts. A row
per judged step, and one with the median error.

With --steps FOLDER nothing is run: the steps are those that `benchmarks/gpu.py --steps FOLDER` noted on --machine. Fitted are a
few of every other row of its table and each SAMPLE-th step of its last one, a whole workload; judged are all others of that.
"""

from __future__ import annotations

import argparse
import gc
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import HERE, cpu_name, provenance, write_rows

from ridgeline.bench.steps import FIT_SHAPES, VALIDATION_SHAPES, measure, shapes
from ridgeline.cli.calibrate import bounds, guess
from ridgeline.cli.roofline import read_spec
from ridgeline.core.calibration import Calibration, Errors
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.engine.local import LocalEngine
from ridgeline.hardware.ceilings import place
from ridgeline.hardware.probe import Device, probe
from ridgeline.planner.calibrate import Measured, calibrate, errors

MAX_LEN = 10_240
TURNS = 6
SAMPLE = 12
FITTED_OF_A_ROW = 40
SHOWN = 24
"""Of a workload's judged steps, as rows; the errors are those of all."""


def noted(path: Path) -> tuple[list[Measured], list[Measured]]:
    """Steps to fit on and steps to judge by, from a file of `gpu.py --steps`; the last row ran a warm-up, then its work."""
    *others, work = [[_measured(record) for record in row] for row in json.loads(path.read_text()).values()]
    begun = next(
        place
        for place in range(1, len(work))
        if not work[place].decode and work[place].chunks[0][0] == 0 and not work[place - 1].chunks
    )
    work = work[begun:]
    fit = [step for row in others for step in row[len(row) // 8 :][:: max(1, len(row) // FITTED_OF_A_ROW)]]
    return fit + work[::SAMPLE], [step for place, step in enumerate(work) if place % SAMPLE]


def _measured(note: list[Any]) -> Measured:
    decode, chunks, logits, seconds = note
    return Measured(tuple(decode), tuple((start, count) for start, count in chunks), logits, seconds)


def take(model: ModelConfig, arguments: argparse.Namespace) -> tuple[list[Measured], list[Measured]]:
    """Steps to fit on and steps to judge by, from one engine; in turns, so that clocks and load are the same for both."""
    config = EngineConfig(
        device=arguments.device, max_num_seqs=arguments.rows, enable_prefix_caching=False, threads=arguments.threads
    )
    local = LocalEngine.start(model, config)
    try:
        limits = bounds(local, arguments.most_tokens)
        fit: list[Measured] = []
        judge: list[Measured] = []
        for turn in range(TURNS):
            for ladder, steps in ((FIT_SHAPES, fit), (VALIDATION_SHAPES, judge)):
                steps += measure(local, shapes(ladder, limits)[turn::TURNS], arguments.repeats)
    finally:
        local.close()
    seen = {case.label for case in fit}
    return fit, [case for case in judge if case.label not in seen]


def rows_of(
    name: str, calibration: Calibration, blind: CostModel, judge: list[Measured], origin: dict[str, str]
) -> list[dict[str, Any]]:
    """Result rows: each judged step, then the errors over all. blind: the model before its calibration."""
    missed = errors(calibration.cost, judge)
    rows = []
    shown = max(1, len(judge) // SHOWN) if len(judge) > 10 * SHOWN else 1
    for step, error in list(zip(judge, missed, strict=True))[::shown]:
        facts = {
            "row": f"{name} {step.label}",
            "device": calibration.device,
            "model": name,
            "step": step.label,
            "predicted_ms": round(step.seconds * (1 + error) * 1e3, 4),
            "measured_ms": round(step.seconds * 1e3, 4),
            "error": round(error, 4),
        }
        rows.append(facts | origin)
    over_all, before = Errors.of(missed), Errors.of(errors(blind, judge))
    summary = {
        "row": f"{name} median error",
        "device": calibration.device,
        "model": name,
        "steps": len(judge),
        "median_error": round(over_all.median, 4),
        "p90_error": round(over_all.p90, 4),
        "leave_one_out_median": round(calibration.unseen.median, 4),
        "uncalibrated_median": round(before.median, 4),
        "target": 0.10,
    }
    return [*rows, summary | origin]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-0.6b", help="names below benchmarks/models, or folders; "
                        "'shipped' is the model that comes with Ridgeline")  # fmt: skip
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=512, help="most sequences at once")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads for the model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-tokens", type=int, default=None, help="most tokens of cache that one shape holds")
    parser.add_argument("--calibrations", default=None, help="folder for each model's calibration JSON")
    parser.add_argument("--steps", default=None, help="folder of notes to judge instead of running anything")
    parser.add_argument("--machine", default="NVIDIA H200", help="where the notes were taken")
    arguments = parser.parse_args()
    device = probe().device(arguments.device)
    machine = torch.cuda.get_device_name() if device.kind == "cuda" else cpu_name()
    if arguments.steps:
        device, machine = Device("cuda", arguments.machine, 0, 0), arguments.machine
    origin = provenance(machine)
    for name in arguments.models.split(","):
        folder = HERE / "models" / name
        if name == "shipped":
            model = ModelConfig()
        else:
            path = str(folder if folder.is_dir() else name)
            model = ModelConfig(model=path, load_format="dummy", max_model_len=MAX_LEN)
        notes = Path(arguments.steps or "") / f"steps-{name}.json"
        fit, judge = noted(notes) if arguments.steps else take(model, arguments)
        gc.collect()
        blind = guess(read_spec(model), device)
        where = machine if arguments.steps else place(torch.device(device.kind))
        calibration = calibrate(blind, fit, where, datetime.now(UTC).strftime("%Y-%m-%d"))
        rows = rows_of(Path(name).name, calibration, blind, judge, origin)
        for row in rows:
            if "error" in row:
                print(
                    f"{row['row']:50s} {row['measured_ms']:10.3f} ms {row['predicted_ms']:10.3f} ms {row['error']:+7.1%}"
                )
        print({key: value for key, value in rows[-1].items() if key not in origin}, flush=True)
        if arguments.calibrations:
            target = Path(arguments.calibrations)
            target.mkdir(parents=True, exist_ok=True)
            (target / f"{Path(name).name}.json").write_text(calibration.to_json(), encoding="utf-8")
        if arguments.out:
            write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()

"""Rows of batches in a server with several models: each goes to the engine of the model that it names.

A model that is not awake is loaded, or woken, for its rows when the models that give way for it are idle: no request has used them
for `IDLE_S`, or for the seconds that the load takes if that is longer, so that loads for rows take at most half of the time. Online
requests that need the memory take it back at once: the rows are withdrawn and run again later.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

from ridgeline.core.errors import EngineFailed, ModelNotFound, RequestError, RidgelineError, Unavailable
from ridgeline.service.batches.admission import IDLE_S, LaneAdmission
from ridgeline.service.batches.engine_rows import EngineRows
from ridgeline.service.batches.rows import RowAnswer, RowRequest
from ridgeline.service.errors import error_body
from ridgeline.service.keys.errors import ModelNotAllowed
from ridgeline.service.keys.keyring import Holder
from ridgeline.service.models.front import ModelsFront
from ridgeline.service.models.model import Model

LOADS = 3
"""Loads of a model in succession that fail before its rows do."""
RETRY_S = 60.0
"""Seconds after which rows load such a model again."""


class ModelRows:
    """See `Rows`. impact: as for `LaneAdmission`."""

    def __init__(self, front: ModelsFront, impact: float | None) -> None:
        self._front = front
        self._engines = {model.name: _engine_rows(model, impact) for model in front.models.values()}
        self._rising: asyncio.Task[None] | None = None
        """Loads or wakes a model for its rows."""
        self._failures: Counter[str] = Counter()
        """Loads of each model that have failed in succession."""
        self._problems: dict[str, tuple[float, str]] = {}
        """Of models whose last load failed: when, and why."""

    def take(self, choices: int, model: str | None, holder: Holder) -> bool:
        chosen = self._find(model)
        if chosen is None:
            return True  # `run` raises the error
        engine = self._engines[chosen.name]
        if self._problem(chosen) or not _allowed(holder, chosen):
            engine.take_anyway(choices)  # `run` answers with the problem; `give_back` returns the places
            return True
        if chosen.awake:
            return engine.take(choices, model, holder)
        self._raise(chosen)
        return False

    def give_back(self, choices: int, model: str | None) -> None:
        if (chosen := self._find(model)) is not None:
            self._engines[chosen.name].give_back(choices)

    def may_pass(self, model: str | None) -> bool:
        """Yes, unless the model waits for the memory of others, which their rows would keep busy."""
        chosen = self._find(model)
        return chosen is not None and (chosen.awake or self._front.fits_beside_others(chosen))

    def wait(self, count: int) -> None:
        """Nothing: `take` loads models."""

    async def watch(self) -> None:
        """Withdraw rows when online requests need their places, until cancelled."""
        await asyncio.gather(*(rows.watch() for rows in self._engines.values()))

    async def run(self, row: RowRequest) -> RowAnswer:
        name = row.body.get("model")
        if name is None:
            raise RequestError(
                f"model is missing: this server has several models, name one in each row: {', '.join(self._engines)}.",
                param="model",
            )
        chosen = self._front.model(str(name))
        row.holder.check_model(chosen.name)
        if problem := self._problem(chosen):
            error = EngineFailed(problem)
            return RowAnswer(error.status, error_body(error), None)
        if not chosen.awake or chosen.front is None:
            raise Unavailable("The model is not awake: rows of batches wait.")
        return await self._engines[chosen.name].run(replace(row, body={**row.body, "model": chosen.name}))

    def _find(self, name: str | None) -> Model | None:
        try:
            return None if name is None else self._front.model(name)
        except ModelNotFound:
            return None

    def _problem(self, model: Model) -> str:
        """Why rows of the model fail; "" if they may run."""
        at, text = self._problems.get(model.name, (0.0, ""))
        failed = self._failures[model.name] >= LOADS and time.monotonic() - at < RETRY_S
        return text if failed and not model.awake else ""

    def _raise(self, model: Model) -> None:
        """Begin to load or wake a model, if others give way for it."""
        loading = self._rising is not None and not self._rising.done()
        if loading or self._front.draining or not self._front.has_room(model, max(IDLE_S, model.load_s)):
            return
        self._rising = asyncio.get_running_loop().create_task(self._wake(model))

    async def _wake(self, model: Model) -> None:
        try:
            await self._front.wake(model.name)
            self._failures[model.name] = 0
        except RidgelineError as error:
            self._failures[model.name] += 1
            self._problems[model.name] = time.monotonic(), error.message


def _allowed(holder: Holder, model: Model) -> bool:
    try:
        holder.check_model(model.name)
    except ModelNotAllowed:
        return False
    return True


def _engine_rows(model: Model, impact: float | None) -> EngineRows:
    live = model.metrics.live
    return EngineRows(lambda: model.front if model.awake else None, live, LaneAdmission(live.slo, impact))

"""What requests verify beside their own next token: whose drafts, and how many nodes.

Drafting pays while the time that a step takes longer is worth less than the tokens it gains. Both are measured: how often
each node of a draft is kept, and how long steps take by how many rows and nodes they have. So speculation is off where it
does not pay, and on again where it does (Leviathan et al. 2023, section 3.3, chooses by the same sums from given rates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ridgeline.core.draft import DEVICE, NOTHING, Draft, HostDrafter, repeats
from ridgeline.core.plan import StepResult
from ridgeline.engine.flight import FlyingStep, Share
from ridgeline.engine.pace import PRICE, Pace, Reading
from ridgeline.engine.request import Request


class Speculation:
    """most: nodes of the largest draft. reach: slots behind all tokens that may be gained which drafting on the device writes.
    resting: steps are those of plain decoding, and nobody need be asked about any request. By itself it proposes nothing."""

    most = reach = 0
    resting = False

    def waits(self, request: Request) -> bool:
        """Whether the request can be planned only when its last token is committed."""
        return False

    def plain(self, request: Request) -> bool:
        """Whether the request's next step is one of plain decoding: nothing is proposed for it."""
        return not self.waits(request)

    def propose(self, request: Request, most: int) -> Draft:
        """A draft of at most `most` nodes for the request's next step."""
        return NOTHING

    def ahead(self, step: FlyingStep) -> None:
        """State in the planned step what the device drafts for the next ones."""

    def learn(self, request: Request, draft: Draft, tokens: Sequence[int], result: StepResult, place: int) -> None:
        """The request gained `tokens` by the step, in which it had `place`."""

    def measure(self, step: FlyingStep, result: StepResult) -> float:
        """A step was committed. Returns the seconds that its drafts saved."""
        return 0.0


class NoDrafts(Speculation):
    """Every request verifies nothing."""

    resting = True


NO_DRAFTS = NoDrafts()

_HEAT = attrgetter("sampling.temperature")
_MEMORY = 0.2
"""Weight of a new draft in what is remembered of a request's drafts."""
_BOOKED = 8
"""While drafting rests, one in so many steps stands for all."""
_BETWEEN = 32
"""Tokens of a request after which it is asked again whether its text can be quoted."""
_GLANCE, _HOPE = 4, 0.5
"""Steps of a rest after which requests are looked at again for whether their last tokens repeat; tokens that a question is
expected to win then."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What the host must know of a device drafter. most: nodes of its largest draft; parents: theirs, empty for chains.
    reads: it keeps keys and values of its own, so it must read every token once. cuts: it says what is worth verifying."""

    most: int
    parents: tuple[int, ...] = ()
    reads: bool = False
    cuts: bool = False

    def draft(self, nodes: int) -> Draft:
        return Draft((DEVICE,) * nodes, self.parents[:nodes])


class Drafts(Speculation):
    """Drafts of a host drafter (whatever it proposes goes first), of the device's, or of both. pace: how many nodes pay.
    logit_rows: most tokens of a step that logits may be wanted for, where it has drafts."""

    def __init__(
        self, host: HostDrafter | None, device: OnDevice | None, pace: Pace, logit_rows: int = 1 << 30
    ) -> None:
        self.most = pace.sizes[-1]
        self.reach = self.most if device is not None and device.reads else 0
        self.resting = False
        self._host, self._device, self._pace = host, device, pace
        self._paces = pace, Pace(pace.sizes, pace.fixed)
        """Of steps that draw none of their tokens, whose drafts are kept more often, and of others."""
        self._sizes = [] if device is None else [device.draft(nodes) for nodes in range(device.most + 1)]
        parents = () if device is None else device.parents
        self._straight = next((node for node, parent in enumerate(parents) if parent != node - 1), self.most)
        """The first nodes of the device's draft that are a chain."""
        self._rows, self._size, self._logit_rows = 1, 0, logit_rows
        self._rest = self._waiting = self._new = 0
        self._plain = self._paces[0], 0, 0
        """Steps without drafts one after the other that nobody has booked: their pace, rows and number."""
        self._asked: list[Request] = []
        self._quoted = 0.0
        """What a question won lately that was asked to find out: what is expected for a new request."""

    def waits(self, request: Request) -> bool:
        """A request is asked while that pays, and now and then to find out; in between it costs nothing."""
        if self._host is None or self.resting:
            return False
        said = len(request.tokens)
        if request.asked_to < 0:
            # Where a glance promises something a request's own questions decide: in a batch one alone bears the price of all rows.
            request.asked_to, request.quoted = 0, max(self._quoted, _HOPE if self._host.quotes else 0.0)
        if self._host.quotes and not (self._pace.fixed or request.gained or repeats(request.tokens)):
            return False
        asks = said < request.asked_to or (request.quoted > 0 and self._pace.affords(self._rows))
        new = not request.asked_to
        due = new or said >= request.asked_to + _BETWEEN
        if not asks and due and (tokens := self._pace.look(self._rows, new=new)):
            request.asked_to, asks = said + tokens, True
        self._waiting += asks
        return asks

    def plain(self, request: Request) -> bool:
        # A draft model writes behind the rows, in slots that only the longer way leases.
        request.found = None
        if self.reach or request.offered:
            return False
        if self._host is None or not self.waits(request):
            return True
        if request.in_flight:
            return False
        # A host drafter that has nothing to say costs the question and no more.
        found = self._guess(self._host, request)
        request.found = found if found.tokens else None
        return not found.tokens

    def propose(self, request: Request, most: int) -> Draft:
        # A draft is verified by the next step or never: afterwards other tokens stand in its places.
        offered, request.offered = min(most, request.offered), 0
        # What the device drafted is not known here, so no grammar could be asked.
        if request.constraint is not None:
            offered = 0
        found, request.found = request.found, None
        if found is None and self._host is not None and self.waits(request):
            found = self._guess(self._host, request)
        if found is not None and (found := found.first(most)).tokens:
            likely = sum(request.kept ** (node + 1) for node in range(len(found.tokens)))
            if not offered or likely > self._pace.gained(offered) - 1:
                return found
        if request.sampling.penalized:  # see _guess
            return Draft(self._sizes[offered].tokens[: self._straight]) if offered else NOTHING
        return self._sizes[offered] if offered else NOTHING

    def _guess(self, host: HostDrafter, request: Request) -> Draft:
        """What the host drafter proposes for the request; it hears only now of what others said."""
        tokens = request.tokens
        self._asked.append(request)
        request.gained = 0
        if request.guess is None:
            request.guess = host.start(tokens)
        elif request.heard < len(tokens):
            news = tokens[request.heard :]
            request.guess.hear(news, NOTHING, news[:1])
        request.heard = len(tokens)
        room = min(self.most, self._logit_rows // self._rows - 1, request.limit - request.expected - 1)
        nodes = min(room, self._pace.worth(self._rows, request.kept))
        found = request.guess.propose(nodes, nodes) if nodes > 0 else NOTHING
        # Penalties count what a row's tokens say from its start on, which only a chain does.
        return found.chain() if request.sampling.penalized else found

    def ahead(self, step: FlyingStep) -> None:
        if self.resting:
            self._rest -= 1
            self.resting = self._rest > 0 and not (step.plan.joins or self._glance(step))
            return
        device, plan, rows = self._device, step.plan, sum(step.plan.samples)
        self._rows, self._pace = max(1, rows), self._paces[any(map(_HEAT, step.requests))]
        self._new += sum(join.choice == 0 for join in plan.joins)
        if rows and self._new:
            self._pace.welcome(rows, self._new)
            self._new = 0
        step.size, self._size = self._size, 0
        step.asked, self._asked = self._asked, []
        waiting, self._waiting = self._waiting, 0
        # Where a text is quoted at length, what the device drafts beside it is seldom verified.
        quoted = plan.drafts and min(plan.drafts) >= 0 and min(one.quoted for one in step.requests) > 1
        if device is not None and rows and not quoted:
            self._size = self._pace.choose(rows, min(device.most, max(0, self._logit_rows // rows - 1)))
        plan.ahead = self._size
        step.drafting = bool(step.size or plan.ahead or step.asked or plan.drafts)
        if device is not None and (step.drafting or device.reads):
            self._offer(step, device)
        if rows and not (step.drafting or waiting or plan.joins or self.reach):
            self._rest = self._pace.rest(rows, host=self._host is not None, device=device is not None)
            self.resting = self._rest > 0

    def _glance(self, step: FlyingStep) -> bool:
        """Whether somebody's text is worth a question all at once. Steps that rest are not thought over for that."""
        host = self._host
        due = host is not None and host.quotes and not self._rest % _GLANCE and self._pace.affords(self._rows)
        return due and any(one.quoted > 0 and repeats(one.tokens) for one in step.requests)

    def _offer(self, step: FlyingStep, device: OnDevice) -> None:
        """Note what the step drafts for each of its requests."""
        plan, unread = step.plan, step.plan.unread
        for place, request in enumerate(step.requests):
            request.offered = plan.ahead if plan.samples[place] else 0
            if device.reads:
                request.unread = _unread(request, step.shares.get(place))
                if plan.samples[place] and plan.ahead:
                    unread.append(min(request.unread, len(request.tokens) + 1))
                    request.unread = 0

    def learn(self, request: Request, draft: Draft, tokens: Sequence[int], result: StepResult, place: int) -> None:
        kept = result.kept.get(place, [])
        if draft.tokens and draft.tokens[0] == DEVICE:
            self._pace.learn(len(draft.tokens) + request.cut, kept)
        elif draft.tokens:
            tried = min(len(draft.tokens), len(kept) + 1)
            request.kept += _MEMORY * (len(kept) / tried - request.kept)
            request.gained = len(kept)
            if request.guess is not None:
                request.guess.hear(tokens, draft, result.drawn[place])
                request.heard = len(request.tokens)

    def measure(self, step: FlyingStep, result: StepResult) -> float:
        plan, rows = step.plan, len(step.requests)
        if not step.drafting:
            pace, many, steps = self._plain
            self._plain = self._pace, rows, steps + 1 if pace is self._pace and many == rows else 1
        if self.resting and not step.drafting and self._rest % _BOOKED:
            return 0.0
        for place, worth in result.worth.items():
            request = step.requests[place]
            request.cut = 0
            if worth < request.offered and not request.in_flight:  # else what is offered is a later step's
                if not worth:
                    self._pace.learn(request.offered, [])
                request.cut, request.offered = worth and request.offered - worth, worth
        if result.error is not None or 0 in plan.samples or sum(plan.n_query) != rows + len(plan.drafts):
            return 0.0
        seconds = result.device_s + result.gap_s
        if not step.drafting:
            if not result.fresh:
                self._pace.rested(rows, seconds, self._plain[2])
                self._plain = self._pace, rows, 0
            return 0.0
        asked, gained, idle = step.asked, len(result.tokens) / rows, not plan.drafts
        if not asked:
            # A step that drafts otherwise than it verifies tells nothing of either size.
            read = Reading(rows, gained, seconds, fresh=result.fresh)
            return self._pace.drafted(read, step.size, steady=plan.ahead == step.size, idle=idle)
        nodes, quoted = len(plan.drafts) - plan.drafts.count(DEVICE), sum(one.gained for one in asked)
        read = Reading(rows, gained, seconds, nodes / rows, quoted / rows, result.fresh, len(asked) / rows)
        if plan.ahead or step.size:
            saved, price = self._pace.drafted(read, step.size, steady=False, idle=idle), PRICE
        else:
            saved, price = self._pace.asked(read, len(asked), sum(map(_looking, asked)))
        for request in asked:
            request.quoted += _MEMORY * (request.gained - price - request.quoted)
            if _looking(request):
                self._quoted += _MEMORY / 4 * (request.gained - price - self._quoted)
        return saved


def _looking(request: Request) -> bool:
    """Whether it was asked last to find out."""
    return request.heard <= request.asked_to


def _unread(request: Request, share: Share | None) -> int:
    """Tokens that a draft model has not read once the step's own are drawn, if it drafts nothing in it."""
    if share is None:
        return request.unread + 1
    drafted = share.draft.tokens
    if share.n_query > 1 + len(drafted):  # it reads along with the target
        return int(share.samples)
    if drafted and drafted[0] == DEVICE:
        # Its own drafts but for the last one are read, and then what was drawn behind them.
        return request.unread + 2
    return request.unread + 1 + len(drafted)

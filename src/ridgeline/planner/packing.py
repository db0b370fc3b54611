"""Placement as an integer program over patterns, solved with HiGHS.

A pattern is what a GPU may hold together: counts of replicas, and at most one rank of a replica that several GPUs share. A variable
counts the GPUs of a class (kind, and what they hold now) with a pattern, as in cutting stock (Gilmore and Gomory 1961). Solutions
that differ only in the numbers of equal GPUs are one solution here. If all patterns are few, all are in the program, and the
answer is optimal. Otherwise patterns are generated: the dual prices of the linear relaxation say what a replica is worth, and a
knapsack for each class finds the best pattern at these prices. The value of the relaxation plus the best reduced costs is a bound
(Lagrangian; Lasdon 1970). The integer program over the generated patterns gives the answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.planner.placement import EPSILON, Fleet, Footprint, Gpu, Replica, split_device

try:
    import highspy
except ImportError:  # the extra `plan` is not installed
    highspy = None  # type: ignore[assignment]

ALL_PATTERNS = 4000
"""Patterns up to which all are in the program."""
GENERATED_GAP = 1e-3
"""Gap to which the integer program over generated patterns is solved. That of the patterns themselves is usually larger."""
PENALTIES = (100.0, 1e5)
"""Cost of load that is not served, relative to the dearest way to serve it. The second follows where the first leaves some."""
Pattern = tuple[tuple[int, int], ...]
"""(Number of an entry of the fleet, copies), by entry."""


def available() -> bool:
    """Whether HiGHS is installed (the extra `plan`)."""
    return highspy is not None


@dataclass(frozen=True)
class GpuClass:
    """GPUs that are alike. held: what they hold now, copies by (number of a model, GPUs of a replica); empty for the class of GPUs
    whose content does not stay, which any GPU of the kind can join. devices: numbers of those that start in the class."""

    gpu: Gpu
    held: Mapping[tuple[int, int], int]
    devices: tuple[int, ...]

    @property
    def count(self) -> int | None:
        """GPUs that can be in the class; None if any number can be rented."""
        return len(self.devices) if self.held else self.gpu.count

    def keeps(self, fleet: Fleet, pattern: Pattern) -> bool:
        """Whether some of what a GPU holds stays with a pattern."""
        return not self.held or any(
            (model, foot.gpus) in self.held for model, foot in (fleet.entries[entry] for entry, _ in pattern)
        )


Chosen = Sequence[tuple[GpuClass, Pattern, int]]
"""GPUs by class and pattern."""


@dataclass(frozen=True)
class Packing:
    """The answer of the program. groups: replicas by number of an entry that several GPUs share. bound: of its objective, which is
    minimized. optimal: all patterns were in it, and it was solved. short: load that no pattern serves, by number of a model."""

    chosen: Chosen
    groups: Mapping[int, int]
    bound: float
    optimal: bool
    patterns: int
    short: Mapping[int, float]


def classes(fleet: Fleet) -> list[GpuClass]:
    """GPUs by kind and what they hold."""
    held: dict[str, Counter[tuple[int, int]]] = {}
    for replica in fleet.kept:
        for device in replica.devices:
            held.setdefault(device, Counter())[fleet.numbers[replica.model], len(replica.devices)] += 1
    alike: dict[tuple[str, tuple[Any, ...]], list[int]] = {}
    for device, content in held.items():
        kind, number = split_device(device)
        alike.setdefault((kind, tuple(sorted(content.items()))), []).append(number)
    made = [
        GpuClass(fleet.by_name[kind], dict(content), tuple(sorted(devices)))
        for (kind, content), devices in alike.items()
    ]
    for gpu in fleet.gpus:
        taken = {number for entry in made if entry.gpu == gpu for number in entry.devices}
        made.append(GpuClass(gpu, {}, tuple(number for number in range(gpu.count or 0) if number not in taken)))
    return made


def patterns(fleet: Fleet, gpu: Gpu, limit: int, maximal: bool) -> list[Pattern] | None:
    """All patterns of a kind of GPU, or only those to which nothing can be added; None if there are more than `limit`."""
    entries = [number for number, (_, foot) in enumerate(fleet.entries) if foot.gpu == gpu.name]
    stack: list[tuple[int, dict[int, int]]] = [(0, {})]
    made, seen = list[Pattern](), 0
    while stack:
        start, held = stack.pop()
        seen += 1
        if seen > limit:
            return None
        larger = {entry: {**held, entry: held.get(entry, 0) + 1} for entry in entries}
        larger = {entry: more for entry, more in larger.items() if fleet.fits(gpu, more)}
        if held and not (maximal and larger):
            made.append(tuple(sorted(held.items())))
        stack += [
            (position, larger[entry]) for position, entry in enumerate(entries) if position >= start and entry in larger
        ]
    return made


def pack(fleet: Fleet, start: Sequence[Replica], seconds: float) -> Packing:
    """GPUs by class and pattern. start: a placement whose patterns are taken first where not all are in the program. seconds: of
    processor time, after which no patterns are generated (twice as many if something runs already). The integer program then takes
    up to as long."""
    alike = classes(fleet)
    every = _every_pattern(fleet, alike)
    for penalty in PENALTIES:
        program = Program(fleet, alike, penalty)
        bound = -math.inf if every is not None else _generated(program, start, time.process_time() + seconds)
        for number, pattern in every or ():
            program.add(number, pattern)
        integer_bound, solved = program.solve_integers(seconds, 1e-6 if every is not None else GENERATED_GAP)
        if not program.short():
            break
    bound = max(bound, integer_bound) if every is not None else bound
    exact = every is not None and solved
    return Packing(program.chosen(), program.groups(), bound, exact, len(program.columns), program.short())


def _every_pattern(fleet: Fleet, alike: Sequence[GpuClass]) -> list[tuple[int, Pattern]] | None:
    """(Number of a class, pattern) of all patterns, or None if they are too many."""
    made = list[tuple[int, Pattern]]()
    for number, entry in enumerate(alike):
        part = patterns(fleet, entry.gpu, ALL_PATTERNS - len(made), maximal=not fleet.previous)
        if part is None:
            return None
        made += [(number, pattern) for pattern in part if entry.keeps(fleet, pattern)]
    return made


def _in_placement(
    fleet: Fleet, alike: Sequence[GpuClass], replicas: Sequence[Replica]
) -> Iterator[tuple[int, Pattern]]:
    """(Number of a class, pattern) of every GPU in a placement."""
    entries = {(fleet.models[number].name, foot): entry for entry, (number, foot) in enumerate(fleet.entries)}
    held: dict[str, Counter[int]] = {}
    for replica in replicas:
        for device in replica.devices:
            if replica.footprint is not None:
                held.setdefault(device, Counter())[entries[replica.model, replica.footprint]] += 1
    places = {f"{entry.gpu.name}:{device}": number for number, entry in enumerate(alike) for device in entry.devices}
    joined = {entry.gpu.name: number for number, entry in enumerate(alike) if not entry.held}
    for device, content in held.items():
        pattern, common = tuple(sorted(content.items())), joined[split_device(device)[0]]
        number = places.get(device, common)
        yield number if alike[number].keeps(fleet, pattern) else common, pattern


def _generated(program: Program, start: Sequence[Replica], until: float) -> float:
    """Add patterns until none improves the relaxation, or time is over. Returns the bound.

    GPUs whose content does not stay come first. Where much runs already, the others are too many to price all in each round, so the
    bound is that of a fleet in which nothing runs: moves cost something, so it holds here too.
    """
    fleet, alike, started = program.fleet, program.classes, time.process_time()
    for number, pattern in _in_placement(fleet, alike, start):
        program.add(number, pattern)
    if not fleet.previous:
        bound = _rounds(program, range(len(alike)), until)
        _dive(program, range(len(alike)), until)
        return bound
    fresh = Program(replace(fleet, previous=()), classes(replace(fleet, previous=())), program.penalty)
    bound = _rounds(fresh, range(len(fresh.classes)), until)
    _dive(fresh, range(len(fresh.classes)), until)
    common = {entry.gpu.name: number for number, entry in enumerate(alike) if not entry.held}
    for number, pattern in fresh.columns:
        program.add(common[fresh.classes[number].gpu.name], pattern)
    _rounds(program, range(len(alike)), until + (until - started))
    return bound


def _dive(program: Program, numbers: Sequence[int], until: float) -> None:
    """Generate patterns for what a rounded relaxation leaves: those of the relaxation alone combine badly to whole numbers."""
    fixed = Counter[int]()
    while time.process_time() < until and program.rounded(fixed):
        program.set_bounds(fixed)
        _rounds(program, numbers, until)
    program.set_bounds(Counter())


def _rounds(program: Program, numbers: Sequence[int], until: float) -> float:
    """Rounds of pricing of classes by number. Returns the bound, -inf if time was over in the first round."""
    bound = -math.inf
    while True:
        value = program.solve_relaxation()
        slack, improved = 0.0, False
        for number in numbers:
            if time.process_time() > until:
                return bound
            pattern, least = program.priced(number)
            if least < 0:
                slack += least * program.most_gpus(program.classes[number])
                improved |= program.add(number, pattern)
        bound = max(bound, value + slack)
        if not improved or value - bound <= 1e-6 * max(1.0, abs(value)):
            return bound


class Program:
    """The program over the patterns that it has so far. It minimizes dollars per hour, or the negative load served, plus moves.

    Rows: a model's load; ranks of each entry that several GPUs share; GPUs of each class; GPUs of hosts that hold groups; limits.
    """

    def __init__(self, fleet: Fleet, alike: Sequence[GpuClass], penalty: float) -> None:
        self.fleet, self.classes, self.penalty = fleet, alike, penalty
        self._highs = _silent()
        self.columns: dict[tuple[int, Pattern], int] = {}
        """Columns of the solver by number of a class and pattern."""
        self._bounds: list[tuple[float, float]] = []
        self._coefficients: list[Mapping[int, float]] = []
        self._duals: Sequence[float] = ()
        self._values: Sequence[float] = ()
        serving = fleet.goal == "most"
        self._load = [self._row(0.0 if serving else model.load, math.inf) for model in fleet.models]
        self._shared = {
            entry: self._row(0.0, math.inf) for entry, (_, foot) in enumerate(fleet.entries) if foot.gpus > 1
        }
        kinds = {gpu.name: self._row(-math.inf, gpu.count) for gpu in fleet.gpus if gpu.count is not None}
        self._counts = list[list[int]]()
        """Rows that count the GPUs of each class: of its kind, and of the class."""
        for like in alike:
            rows = [kinds[like.gpu.name]] if like.gpu.name in kinds else []
            self._counts.append(rows + ([self._row(-math.inf, len(like.devices))] if like.held else []))
        self._limits = [
            (name, self._row(-math.inf, limit))
            for name, limit in (("usd_hour", fleet.usd_hour), ("watts", fleet.watts))
            if limit is not None
        ]
        self._unserved = list[int]()
        for number, model in enumerate(fleet.models):
            if serving:
                self._column(-model.weight, {self._load[number]: -1.0}, model.load)
            else:
                dearest = max((self._cost(foot) for foot in model.footprints), default=1.0)
                self._unserved.append(self._column(penalty * max(dearest, 1e-3), {self._load[number]: 1.0}))
        self._replicas: dict[int, int] = {}
        """Columns that count the replicas of entries that several GPUs share."""
        hosts = self._host_rows()
        for entry, row in self._shared.items():
            number, foot = fleet.entries[entry]
            coefficients = {self._load[number]: foot.rate, row: -float(foot.gpus)}
            coefficients |= {
                level: float(foot.gpus) for gpus, level in hosts.get(foot.gpu, {}).items() if gpus <= foot.gpus
            }
            self._replicas[entry] = self._column(0.0, coefficients)

    def _cost(self, foot: Footprint) -> float:
        """Dollars per hour of a unit of load on GPUs of its own."""
        return foot.gpus * (self.fleet.by_name[foot.gpu].usd_hour + self.fleet.move_cost) / foot.rate

    def _host_rows(self) -> Mapping[str, Mapping[int, int]]:
        """Rows by kind and number of GPUs: groups of that many or more need hosts with room. Sizes of groups divide each other."""
        rows: dict[str, dict[int, int]] = {}
        for gpu in self.fleet.gpus:
            sizes = {foot.gpus for _, foot in self.fleet.entries if foot.gpu == gpu.name and foot.gpus > 1}
            full, rest = divmod(gpu.count or 0, gpu.per_host)
            room = {size: full * (gpu.per_host // size * size) + rest // size * size for size in sizes}
            if gpu.count is None:  # hosts without end, in which larger groups have no room
                room = {size: 0 for size in sizes if size > gpu.per_host}
            rows[gpu.name] = {size: self._row(-math.inf, gpus) for size, gpus in room.items()}
        return rows

    def _row(self, lower: float, upper: float) -> int:
        self._highs.addRow(lower, upper, 0, [], [])
        self._bounds.append((lower, upper))
        return len(self._bounds) - 1

    def _column(self, cost: float, coefficients: Mapping[int, float], upper: float = math.inf) -> int:
        self._highs.addCol(cost, 0.0, upper, len(coefficients), list(coefficients), list(coefficients.values()))
        self._coefficients.append(coefficients)
        return len(self._coefficients) - 1

    def most_gpus(self, entry: GpuClass) -> float:
        """GPUs of a class that an optimal answer can use."""
        if entry.count is not None:
            return entry.count
        return sum(
            max(foot.gpus * math.ceil(model.load / foot.rate) for foot in model.footprints)
            for model in self.fleet.models
            if model.footprints
        )

    def add(self, number: int, pattern: Pattern) -> bool:
        """Add a pattern of a class. Returns whether it is new."""
        fleet, entry = self.fleet, self.classes[number]
        if not pattern or (number, pattern) in self.columns or not entry.keeps(fleet, pattern):
            return False
        coefficients: dict[int, float] = defaultdict(float)
        copies = Counter[tuple[int, int]]()
        for item, count in pattern:
            model, foot = fleet.entries[item]
            copies[model, foot.gpus] += count
            if foot.gpus > 1:
                coefficients[self._shared[item]] += count
            else:
                coefficients[self._load[model]] += foot.rate * count
        coefficients.update(dict.fromkeys(self._counts[number], 1.0))
        for name, row in self._limits:
            coefficients[row] = getattr(entry.gpu, name)
        loads = sum(max(0, count - entry.held.get(key, 0)) for key, count in copies.items())
        cost = fleet.cost_of_move * loads + (entry.gpu.usd_hour if fleet.goal == "cheapest" else 0.0)
        self.columns[number, pattern] = self._column(cost, coefficients)
        return True

    # --- the relaxation and its prices ------------------------------------------------------------------------------

    def solve_relaxation(self) -> float:
        self._highs.run()
        solution = self._highs.getSolution()
        self._duals, self._values = list(solution.row_dual), list(solution.col_value)
        return float(self._highs.getInfo().objective_function_value)

    def rounded(self, fixed: Counter[int]) -> bool:
        """Solve the relaxation, and add its whole parts to `fixed`, counts by column; if there are none, the largest part as 1.

        Returns whether something was added.
        """
        self.solve_relaxation()
        parts = {column: self._values[column] for column in (*self._replicas.values(), *self.columns.values())}
        whole = {column: math.floor(value + EPSILON) for column, value in parts.items() if value > 1 - EPSILON}
        if not whole:
            largest = max(parts, key=lambda column: parts[column], default=-1)
            whole = {largest: 1} if parts.get(largest, 0.0) > EPSILON else {}
        fixed.update(whole)
        return bool(whole)

    def set_bounds(self, fixed: Mapping[int, int]) -> None:
        """Bounds of the rows for what is left beside fixed columns."""
        taken: dict[int, float] = defaultdict(float)
        for column, count in fixed.items():
            for row, value in self._coefficients[column].items():
                taken[row] += count * value
        for row, (lower, upper) in enumerate(self._bounds):
            least = lower - taken[row]
            self._highs.changeRowBounds(row, least, max(least, upper - taken[row]))

    def priced(self, number: int) -> tuple[Pattern, float]:
        """(The best pattern of a class at the current prices, a bound of its reduced cost)."""
        fleet, prices, entry = self.fleet, self._duals, self.classes[number]
        fixed = entry.gpu.usd_hour if fleet.goal == "cheapest" else 0.0
        fixed -= sum(prices[row] for row in self._counts[number])
        fixed -= sum(getattr(entry.gpu, name) * prices[row] for name, row in self._limits)
        values = dict[int, float]()
        for item, (model, foot) in enumerate(fleet.entries):
            if foot.gpu == entry.gpu.name:
                row = self._shared[item] if foot.gpus > 1 else self._load[model]
                value = prices[row] * (1.0 if foot.gpus > 1 else foot.rate)
                if (model, foot.gpus) not in entry.held:
                    value -= fleet.cost_of_move
                if value > 1e-9:
                    values[item] = value
        pattern, best = self._knapsack(entry, values)
        return pattern, fixed - best

    def _knapsack(self, entry: GpuClass, values: Mapping[int, float]) -> tuple[Pattern, float]:
        """(The pattern of the greatest value, a bound of its value). What exceeds the copies that are held costs a move."""
        if not values:
            return (), 0.0
        fleet, items = self.fleet, list(values)
        feet = [fleet.entries[item] for item in items]
        rows = [
            (1.0, {index: foot.bytes / entry.gpu.memory_bytes for index, (_, foot) in enumerate(feet)}),
            (1.0 + EPSILON, {index: foot.share for index, (_, foot) in enumerate(feet) if foot.share}),
            (1.0, {index: 1.0 for index, (_, foot) in enumerate(feet) if foot.gpus > 1}),
        ]
        columns = {model: [index for index, (other, _) in enumerate(feet) if other == model] for model, _ in feet}
        rows += [(1.0, dict.fromkeys(columns[model], 1.0)) for model in columns if fleet.models[model].spread]
        lengths = [self._copies(entry.gpu, model, foot) for model, foot in feet]
        costs = [-value for value in values.values()]
        for key, held in entry.held.items():
            same = [index for index, (model, foot) in enumerate(feet) if (model, foot.gpus) == key]
            if same and fleet.cost_of_move:
                rows.append((float(held), {**dict.fromkeys(same, 1.0), len(costs): -1.0}))
                costs.append(fleet.cost_of_move)
                lengths.append(sum(lengths[index] for index in same))
        rows += self._apart(columns, costs, lengths)
        solution, bound = _solve(costs, lengths, rows)
        counts = {item: round(solution[index]) for index, item in enumerate(items) if solution[index] > 0.5}
        # The solver's tolerance may exceed the memory by some bytes.
        return tuple(counts.items()) if fleet.fits(entry.gpu, counts) else (), -bound

    def _apart(
        self, columns: Mapping[int, list[int]], costs: list[float], lengths: list[float]
    ) -> list[tuple[float, dict[int, float]]]:
        """Rows that keep models apart. Adds a column for each such model: whether the pattern has it."""
        models, rows, present = self.fleet.models, list[tuple[float, dict[int, float]]](), dict[int, int]()
        pairs = [(a, b) for a in columns for b in columns if a != b and models[b].name in models[a].apart]
        for model in {model for pair in pairs for model in pair}:
            present[model] = len(costs)
            costs.append(0.0)
            lengths.append(1.0)
            most = sum(lengths[index] for index in columns[model])
            rows.append((0.0, {**dict.fromkeys(columns[model], 1.0), present[model]: -most}))
        return rows + [(1.0, {present[a]: 1.0, present[b]: 1.0}) for a, b in pairs]

    def _copies(self, gpu: Gpu, model: int, foot: Footprint) -> float:
        """Most copies on one GPU."""
        if foot.gpus > 1 or self.fleet.models[model].spread:
            return 1.0
        return float(min(gpu.memory_bytes // max(1, foot.bytes), math.ceil(self.fleet.models[model].load / foot.rate)))

    # --- the integer program ----------------------------------------------------------------------------------------

    def solve_integers(self, seconds: float, gap: float) -> tuple[float, bool]:
        """Solve over the patterns to a relative gap. Returns a bound of its value, and whether it was solved to the gap."""
        columns = [*self._replicas.values(), *self.columns.values()]
        kinds = [highspy.HighsVarType.kInteger] * len(columns)
        self._highs.changeColsIntegrality(len(columns), columns, kinds)
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + seconds)
        self._highs.setOptionValue("mip_rel_gap", gap)
        self._highs.run()
        self._values = list(self._highs.getSolution().col_value)
        solved = self._highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return float(self._highs.getInfo().mip_dual_bound), solved

    def chosen(self) -> Chosen:
        counts = ((key, round(self._values[column])) for key, column in self.columns.items())
        return [(self.classes[number], pattern, count) for (number, pattern), count in counts if count]

    def groups(self) -> Mapping[int, int]:
        return {entry: round(self._values[column]) for entry, column in self._replicas.items()}

    def short(self) -> Mapping[int, float]:
        missing = {number: self._values[column] for number, column in enumerate(self._unserved)}
        return {number: load for number, load in missing.items() if load > 100 * EPSILON}


def _silent() -> Any:
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    return highs


def _solve(
    costs: Sequence[float], lengths: Sequence[float], rows: Sequence[tuple[float, Mapping[int, float]]]
) -> tuple[Sequence[float], float]:
    """(Values, bound) of a small integer program: minimize costs of columns from 0 to their lengths, with rows at most so much."""
    program = highspy.HighsLp()
    used = [(upper, row) for upper, row in rows if row]
    program.num_col_, program.num_row_ = len(costs), len(used)
    program.col_cost_, program.col_lower_, program.col_upper_ = list(costs), [0.0] * len(costs), list(lengths)
    program.row_lower_, program.row_upper_ = [-highspy.kHighsInf] * len(used), [upper for upper, _ in used]
    starts = [0]
    for _, row in used:
        starts.append(starts[-1] + len(row))
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = starts
    program.a_matrix_.index_ = [column for _, row in used for column in row]
    program.a_matrix_.value_ = [value for _, row in used for value in row.values()]
    program.integrality_ = [highspy.HighsVarType.kInteger] * len(costs)
    highs = _silent()
    highs.passModel(program)
    highs.run()
    return highs.getSolution().col_value, float(highs.getInfo().mip_dual_bound)

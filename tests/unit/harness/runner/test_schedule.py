"""Contracts of harness.runner.plan: order, what starts on free slots, the expected end."""

import dataclasses
import random
from collections.abc import Callable, Iterable

import pytest

from harness.records import CaseSpec, RunSpec
from harness.runner.plan import Job, Queue, arrange, makespan_s


def spec(name: str, world_size: int = 1, replica: int = 0) -> RunSpec:
    return RunSpec(
        config={"name": name}, device="cpu", world_size=world_size, timeout_s=1.0, replica=replica
    )


def case(name: str, world_size: int, reference: str = "") -> CaseSpec:
    legs = [spec(reference or f"{name}-ref", world_size, replica) for replica in (0, 1)]
    return CaseSpec(
        id=name, scenario="s", labels={}, reference=legs[0], control=legs[1],
        candidate=spec(name, world_size), expect="bitwise", checks={},
    )  # fmt: skip


def names(jobs: Iterable[Job]) -> list[str]:
    return [f"{job.spec.config['name']}{'*' if job.spec.replica else ''}" for job in jobs]


def jobs(*given: tuple[str, int, float]) -> list[Job]:
    return [Job(spec(name, width), seconds) for name, width, seconds in given]


class Machine:
    """Slots that a queue fills while a clock goes on; runs take what `takes` says of their name."""

    def __init__(
        self, order: list[Job], slots: int, takes: Callable[[Job], float] = lambda job: job.seconds
    ) -> None:
        self.now = 0.0
        self.free = self.slots = slots
        self.queue = Queue(order)
        self.takes = {job.spec.key: takes(job) for job in order}
        self.running: list[tuple[float, RunSpec]] = []
        self.began: dict[str, float] = {}

    def fill(self) -> list[str]:
        started = []
        while (run := self.queue.next(lambda s: s.world_size <= self.free)) is not None:
            self.free -= run.world_size
            assert self.free >= 0
            self.running.append((self.now + self.takes[run.key], run))
            self.began[run.config["name"]] = self.now
            started.append(run.config["name"])
        return started

    def wait(self) -> str:
        self.running.sort(key=lambda entry: entry[0])
        self.now, run = self.running.pop(0)
        self.free += run.world_size
        return str(run.config["name"])

    def run_all(self) -> float:
        self.fill()
        while self.running:
            self.wait()
            self.fill()
        return self.now


def test_wide_and_long_runs_go_first_and_groups_stay_together() -> None:
    """Widest first, then longest; a reference, its control and its candidates are neighbours."""
    cases = [case("a", 2), case("b", 4), case("c", 4), case("a2", 2, "a-ref")]
    order = arrange(cases, lambda s: 9.0 if s.config["name"] == "c" else 1.0)
    assert names(order) == [
        "c-ref", "c-ref*", "c", "b-ref", "b-ref*", "b", "a-ref", "a-ref*", "a", "a2",
    ]  # fmt: skip


def test_what_is_finished_or_skipped_is_not_in_the_order() -> None:
    """Only runs that are left are arranged."""
    one = case("a", 1)
    assert names(arrange([one], lambda s: 1.0, left=lambda k: k == one.control.key)) == ["a-ref*"]


def test_the_first_run_that_fits_starts() -> None:
    """A run that does not fit yet is overtaken by those that do, and starts when it fits."""
    order = jobs(("a", 3, 2.0), ("b", 3, 2.0), ("c", 1, 1.0), ("d", 1, 9.0))
    machine = Machine(order, slots=4)
    assert machine.fill() == ["a", "c"]
    assert (machine.wait(), machine.fill()) == ("c", ["d"])
    assert (machine.wait(), machine.fill()) == ("a", ["b"])


def test_a_run_that_is_made_again_goes_first() -> None:
    """What the machine failed is made again before all that waits."""
    order = jobs(("a", 1, 1.0), ("b", 1, 1.0), ("c", 1, 1.0))
    machine = Machine(order, slots=1)
    assert machine.fill() == ["a"]
    machine.wait()
    machine.queue.push(order[0].spec)
    assert machine.fill() == ["a"]


def test_jobs_limit_the_plan() -> None:
    """With one job at a time the expected end is the sum."""
    order = jobs(("a", 1, 1.0), ("b", 1, 2.0), ("c", 1, 3.0))
    assert makespan_s(order, slots=8, jobs=1) == 6.0
    assert makespan_s(order, slots=8) == 3.0


@pytest.mark.parametrize("seed", range(6))
def test_slots_are_busy_to_the_end(seed: int) -> None:
    """200 runs of 1, 2, 4 and 8 ranks, expected within a factor of 2, keep 8 slots 85 % busy."""
    draw = random.Random(seed)
    cases = [case(f"c{n}", draw.choice([1, 2, 4, 8]), f"ref{n // 4}") for n in range(120)]
    expected: dict[str, float] = {}

    def seconds(run: RunSpec) -> float:
        return expected.setdefault(run.key, draw.lognormvariate(1.0, 0.7))

    order = list(arrange(cases, seconds))
    assert len({job.spec.key for job in order}) == len(order)
    machine = Machine(order, slots=8, takes=lambda job: job.seconds * draw.uniform(0.5, 2.0))
    wall_s = machine.run_all()
    busy = sum(machine.takes[job.spec.key] * job.spec.world_size for job in order)
    assert len(machine.began) == len({job.spec.config["name"] for job in order})
    assert busy / (8 * wall_s) >= 0.85


def drawn(draw: random.Random, slots: int, number: int) -> list[tuple[str, int, float]]:
    """Runs of any width, of seconds that differ by a thousand."""
    widths = [draw.randint(1, slots) if draw.random() < 0.5 else 1 for _ in range(number)]
    return [(f"r{n}", width, draw.lognormvariate(1.0, 1.2)) for n, width in enumerate(widths)]


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 13])
def test_what_a_plan_takes_is_bounded(slots: int) -> None:
    """At most twice what busy slots would take, and the longest run: half of the slots are busy.

    In the order by width, whoever waits for half of the slots or fewer leaves less than half idle,
    and whoever waits for more does so beside runs as wide, or beside what is over with them.
    """
    for seed in range(20):
        draw = random.Random(1000 * slots + seed)
        runs = drawn(draw, slots, 40)
        took = {name: seconds for name, _, seconds in runs}
        cases = [
            dataclasses.replace(
                case(name, width),
                reference=spec(name, width), control=spec(name, width),
            )
            for name, width, _ in runs
        ]  # fmt: skip

        def seconds(run: RunSpec, took: dict[str, float] = took) -> float:
            return took[run.config["name"]]

        order = list(arrange(cases, seconds))
        machine = Machine(order, slots=slots)
        wall_s = machine.run_all()
        busy_s = sum(width * seconds for _, width, seconds in runs)
        least_s = max(busy_s / slots, max(took.values()))
        assert set(machine.began) == set(took)
        assert least_s <= wall_s * (1 + 1e-9)
        assert wall_s <= 2 * busy_s / slots + max(took.values())
        assert wall_s == pytest.approx(makespan_s(order, slots=slots))

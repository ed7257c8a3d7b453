"""Slots, GPUs, processes: none is shared unasked, nothing is started that cannot fit, or left."""

import signal
import subprocess
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine import Slots, machine
from harness.engine.machine import core_set, cores_in
from harness.errors import UsageError
from harness.records import RunSpec
from tests.support.records import run_spec


def run(world_size: int, name: str = "", device: str = "cuda") -> RunSpec:
    return run_spec(world_size, config={"graph": [], "name": name}, device=device)


@given(st.lists(st.integers(1, 4), max_size=30), st.randoms(use_true_random=False))
def test_no_slot_is_ever_shared(sizes: list[int], random: Random) -> None:
    """Whatever comes and goes, taken devices are distinct and all come back."""
    devices = tuple("4567")
    slots = Slots(4, devices)
    held: dict[str, tuple[str, ...]] = {}
    for i, size in enumerate(sizes):
        spec = run(size, str(i))
        while not slots.fits(spec):
            leaving = random.choice(sorted(held))
            slots.release(leaving)
            del held[leaving]
        held[spec.key] = slots.take(spec)
        taken = [device for owned in held.values() for device in owned]
        assert len(taken) == len(set(taken))
        assert len(held[spec.key]) == size
    for key in held:
        slots.release(key)
    assert slots.take(run(4, "all")) == devices


def test_jobs_and_runs_on_the_cpu_take_slots_too() -> None:
    """A run on the CPU gets no device; with one job a second run waits whatever slots there are."""
    slots, one = Slots(2, devices=("0", "1")), Slots(8, jobs=1)
    assert slots.take(run(2, device="cpu")) == ()
    assert not slots.fits(run(1))
    one.take(run(2, "a", "cpu"))
    assert not one.fits(run(2, "b", "cpu"))


def test_a_placed_run_has_the_devices_that_it_names_and_no_neighbours() -> None:
    """In its order, one of them twice too; none that the machine lacks."""
    slots = Slots(4, devices=tuple("4567"))
    placed = replace(run(3, "placed"), placed=("6", "4", "6"))
    slots.take(run(1, "other"))
    assert not slots.fits(placed)
    slots.release(run(1, "other").key)
    assert slots.take(placed) == ("6", "4", "6")
    assert not slots.fits(run(1, "other"))
    slots.release(placed.key)
    assert slots.fits(run(4))
    for wrong in (("6", "4"), ("6", "4", "9")):
        with pytest.raises(UsageError):
            slots.check(replace(placed, placed=wrong))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_sets_of_cores_are_written_as_taskset_does(cores: set[int]) -> None:
    """And read back."""
    assert cores_in(core_set(cores)) == cores
    assert core_set({0, 1, 2, 7}) == "0-2,7"


def test_what_makes_no_sense_is_refused() -> None:
    """More ranks than slots, GPUs where there are none; no slots, no jobs, devices that differ."""
    for spec, told in (
        (run(3, device="cpu"), "needs 3 slots, there are 2"),
        (run(1), "needs 1 GPUs, this machine has none"), (run(0, device="cpu"), "at least 1 rank"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=told):
            Slots(2).check(spec)
    wrong: list[tuple[int, tuple[str, ...], int | None]] = [(0, (), None), (2, ("0",), None),
                                                            (1, (), 0)]  # fmt: skip
    for counts in wrong:
        with pytest.raises(UsageError):
            Slots(*counts)


def test_a_marked_process_in_the_middle_of_an_exec_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no environment to read yet: it is looked at again; one that has none is left alone."""
    mark = "A_MARK_OF_THIS_TEST=1"
    with (
        subprocess.Popen(["sleep", "60"], env=dict([mark.split("=")])) as marked,
        subprocess.Popen(["sleep", "60"], env={}) as bare,
    ):
        real, looks = machine.has_mark, list[int]()

        def has_mark(pid: int, text: str) -> bool | None:
            looks.append(pid)
            return None if pid == marked.pid and looks.count(pid) == 1 else real(pid, text)

        monkeypatch.setattr(machine, "has_mark", has_mark)
        assert real(bare.pid, mark) is None
        machine.kill_marked(mark)
        assert marked.wait(10) == -signal.SIGKILL
        assert bare.poll() is None
        bare.kill()

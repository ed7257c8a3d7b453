"""Slots: nobody shares one, nothing that cannot fit is started."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.base import Slots
from harness.errors import UsageError
from harness.records import RunSpec


def run(world_size: int, name: str = "", device: str = "cuda") -> RunSpec:
    config = {"graph": [], "name": name}
    plain = {"config": config, "device": device, "world_size": world_size, "timeout_s": 1.0}
    return RunSpec.from_json(plain)


def test_gpus_are_handed_out_once() -> None:
    """Runs under way together never see the same GPU; a released GPU is used again."""
    slots = Slots(4, devices=("4", "5", "6", "7"))
    first, second = run(2, "a"), run(2, "b")
    assert slots.take(first) == ("4", "5")
    assert slots.take(second) == ("6", "7")
    assert not slots.fits(run(1))
    slots.release(first.key)
    assert slots.take(run(1)) == ("4",)


def test_a_cpu_run_takes_slots_but_sees_no_gpu() -> None:
    """A run on the CPU counts against the slots and gets no device."""
    slots = Slots(2, devices=("0", "1"))
    assert slots.take(run(2, device="cpu")) == ()
    assert not slots.fits(run(1))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (run(3, device="cpu"), "needs 3 slots, there are 2"),
        (run(1), "needs 1 GPUs, this machine has none"),
        (run(0, device="cpu"), "at least 1 rank"),
    ],
)
def test_a_run_that_can_never_start_is_refused(spec: RunSpec, told: str) -> None:
    """More ranks than slots, or GPUs where there are none, is a usage error at once."""
    with pytest.raises(UsageError, match=told):
        Slots(2).check(spec)


@pytest.mark.parametrize(
    ("slots", "devices", "jobs"),
    [(0, (), None), (2, ("0",), None), (1, (), 0)],
)
def test_counts_that_make_no_sense_are_refused(
    slots: int, devices: tuple[str, ...], jobs: int | None
) -> None:
    """No slots, no jobs, or devices that do not match the slots are usage errors."""
    with pytest.raises(UsageError):
        Slots(slots, devices, jobs)


def test_jobs_limits_the_runs_not_the_ranks() -> None:
    """With one job, a second run waits although there are slots for it."""
    slots = Slots(8, jobs=1)
    slots.take(run(2, "a", "cpu"))
    assert not slots.fits(run(2, "b", "cpu"))
    with pytest.raises(RuntimeError):
        slots.take(run(2, "b", "cpu"))


@given(st.lists(st.integers(1, 4), max_size=30), st.randoms(use_true_random=False))
def test_no_slot_is_ever_shared(sizes: list[int], random: Random) -> None:
    """Whatever comes and goes, taken devices are distinct and all come back."""
    devices = tuple("0123")
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

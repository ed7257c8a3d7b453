"""The set of stressors, and jitter."""

import time

import pytest
import torch

from fsdp_core.config import STRESSORS
from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Key, make_pool
from fsdp_core.stress import stressors as jitters
from fsdp_core.stress.races import ClockStream
from fsdp_core.stress.stressors import Jitter, StressorMissing, Stressors

CPU = Device("cpu")


def slept(monkeypatch: pytest.MonkeyPatch, seed: int, operators: int = 3000) -> list[float]:
    """Seconds that jitter would sleep over some operators."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    with Jitter(CPU, seed) as jitter:
        x = torch.zeros(1)
        for _ in range(operators):
            x.add_(1)
    assert x.item() == operators
    assert jitter.delays == len(found)
    return found


def test_jitter_delays_now_and_then_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a delay an operator's gap, each of the stated length, repeatable by its seed."""
    one, again, other = (slept(monkeypatch, seed) for seed in (1, 1, 2))
    assert 3000 // jitters.OPERATORS[1] <= len(one) <= 3000 // jitters.OPERATORS[0]
    assert all(jitters.SLEEP_S[0] <= seconds <= jitters.SLEEP_S[1] for seconds in one)
    assert one == again != other


def test_ranks_are_delayed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal delays on all ranks would leave their order alone."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    drawn = []
    for rank in range(2):
        stressors = Stressors(("jitter",), device=CPU, seed=0, rank=rank)
        assert stressors.jitter is not None
        drawn.append(stressors.jitter._random.random())
    assert drawn[0] != drawn[1]


def test_each_name_is_a_stressor_and_no_other_is_active() -> None:
    """Every name of the configuration does something, alone."""
    pool = make_pool("double", CPU, persistent_on_miss=True)
    for name in STRESSORS:
        stressors = Stressors((name,), device=CPU, seed=0, rank=0)
        parts = (stressors.jitter, stressors.scramble, stressors.races)
        kinds = [type(part).__name__.lower() for part in parts if part is not None]
        assert kinds == ([] if name == "poison" else [name])
        assert (stressors.watched(pool) is pool) == (name == "jitter")


def test_active_stressors_go_again() -> None:
    """Streams keep clocks inside, and are plain outside, also when the inside raises."""
    stressors = Stressors(STRESSORS, device=CPU, seed=0, rank=0)

    def fail() -> None:
        with stressors.active():
            assert isinstance(CPU.new_stream("x"), ClockStream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not isinstance(CPU.new_stream("x"), ClockStream)
    assert CPU.storage_watchers == ()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_races_are_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a GPU cannot be watched: saying so beats finding nothing."""
    monkeypatch.setattr(CPU, "kind", "cuda")
    with pytest.raises(StressorMissing, match="Expected device cpu for stressor races, got cuda"):
        Stressors(("races",), device=CPU, seed=0, rank=0)


def test_stressors_of_a_turn_are_at_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison fills, jitter delays and scramble churns in its own turn only, races in every one."""
    stressors = Stressors(STRESSORS, device=CPU, seed=0, rank=0)
    assert stressors.scramble is not None
    churned: list[str] = []
    monkeypatch.setattr(stressors.scramble, "churn", lambda: churned.append("scramble"))
    pool = stressors.watched(make_pool("double", CPU, persistent_on_miss=True))
    seen = {}
    for number, name in enumerate(("jitter", "poison", "scramble")):
        stressors.only((name,))
        with stressors.active():
            stream = CPU.current_stream()
            pool.acquire(Key(number, "grad"), 4, torch.float32, stream).zero_()
            held = pool.acquire(Key(number, "grad"), 4, torch.float32, stream)
            pool.release(Key(number, "grad"), stream)
            modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            is_jittered = stressors.jitter in modes
        stressors.before_step()
        seen[name] = (is_jittered, bool(held.isnan().all()), list(churned))
    assert seen == {
        "jitter": (True, False, []),
        "poison": (False, True, []),
        "scramble": (False, False, ["scramble"]),
    }
    with pytest.raises(ValueError, match=r"Expected some of jitter, .*, got thunder\."):
        stressors.only(("thunder",))

"""A trainer under stress: whatever it does, it does under its stressors."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.config import ModelConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import Axes
from fsdp_core.stress.races import ClockStream
from fsdp_core.train import Trainer, make_trainer

pytestmark = pytest.mark.usefixtures("mesh")

TINY = ModelConfig(vocab_size=40, hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, seq=6)
WORK: dict[str, dict[str, Any]] = {
    "step": {"index": 1},  # the graphs are captured
    "evaluate": {"index": 3},
    "redigest_state": {},
    "close": {},
}
"""What a trainer is asked to do, in order."""
LOOKS = {"at_work", "digest_state", "keep", "named_tensors", "pointer_changes", "rng_states",
         "set_rng_states", "take_turn"}  # fmt: skip
"""Methods that issue nothing on the stream, or read the state while nothing is under stress."""


class Places(TorchDispatchMode):
    """The names of the streams that operators are issued on; "" without stress."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        stream = self._device.current_stream()
        self.seen.add(stream.name if isinstance(stream, ClockStream) else "")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def trainer(axes: Axes, mesh: DeviceMesh) -> Iterator[Trainer]:
    """One that has run a step, and captures in its next."""
    del mesh
    config = TrainConfig(
        model=TINY, steps=5, microbatches=2, graph=("attn",), graph_warmup_steps=1,
        stress=("poison", "scramble", "races"),
    )  # fmt: skip
    made = make_trainer(config, axes, Device("cpu"))
    made.step(0)
    yield made
    made.close()


def test_every_method_of_a_trainer_is_known_here() -> None:
    """A new one is under stress, and said to be here, or it issues no work."""
    methods = {n for n, _ in inspect.getmembers(Trainer, inspect.isfunction) if n[0] != "_"}
    assert methods == WORK.keys() | LOOKS


def test_all_work_of_a_trainer_is_under_stress(trainer: Trainer) -> None:
    """Every operator of every method, captures included, is issued on a stream that is watched."""
    for method, arguments in WORK.items():
        with Places(trainer.device) as places:
            getattr(trainer, method)(**arguments)
        assert places.seen <= {"main", "gather", "reduce"}, method
        assert places.seen or method == "close"
    assert trainer.counts.captured > 0


def test_each_work_begins_with_other_memory_and_ends_with_what_was_found(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stressors do once a step they do around evaluation and the end, too."""
    calls: list[str] = []
    for name in ("before_step", "after_step"):
        monkeypatch.setattr(trainer.stressors, name, lambda name=name: calls.append(name))
    for method, arguments in WORK.items():
        getattr(trainer, method)(**arguments)
        assert calls == ["before_step", "after_step"], method
        calls.clear()


def test_a_trainer_under_stress_keeps_contents(axes: Axes, mesh: DeviceMesh) -> None:
    """Copies are in order with what they copy: no race is found, and each gives its digest."""
    del mesh
    config = TrainConfig(
        model=TINY, steps=3, microbatches=2, graph=("full_iteration",), graph_warmup_steps=1,
        taps=("layers.0.attn:output",), stress=("poison", "scramble", "races"),
    )  # fmt: skip
    trainer = make_trainer(config, axes, Device("cpu"))
    keeping = trainer.keep(("grads:*", "layers.0.attn:output[1]"), 1 << 20)
    for step in range(3):
        kept = keeping.read(trainer.step(step).digests)
        assert len(kept) == len(trainer.digested["grads"][0]) + 1
        assert all(each.as_digested for each in kept)
    trainer.close()

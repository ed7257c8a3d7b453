"""Names of a trainer's tensors, and how many of them move in a step."""

import pytest
import torch

from fsdp_core.config import ConfigError, FsdpConfig, ModelConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import Axes
from fsdp_core.train import Trainer

MODEL = ModelConfig(vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, seq=6)
DEVICE = Device("cpu")
pytestmark = pytest.mark.usefixtures("determinism_as_before")


def trainer(axes: Axes, pool: str = "double", taps: tuple[str, ...] = ()) -> Trainer:
    chosen = TrainConfig(
        model=MODEL, fsdp=FsdpConfig(pool=pool), steps=4, microbatches=2, dtype="fp32", taps=taps
    )
    return Trainer(chosen, axes, DEVICE)


def test_names_follow_what_the_trainer_holds(axes: Axes) -> None:
    """Whatever is replaced, its name gives what took its place."""
    made = trainer(axes)
    made.step(0)
    book = made.named_tensors()
    group = next(group for group in made.groups if group.name == "layers.0")
    first = group.names[0]
    assert book[first].data_ptr() == group.unsharded[0].data_ptr()
    assert book["layers.0 main_weight"] is group.main_weight
    assert book["layers.0 full gradient"] is group.gradients.pooled
    assert book[f"{first} main_grad"].data_ptr() == made.optimizer.grads[
        made.optimizer.names.index(first)
    ].data_ptr()  # fmt: skip
    group.unsharded[0].data = group.unsharded[0].data.clone()
    made.stages[0].rope.cos = made.stages[0].rope.cos.clone()
    made.outputs.__dict__["loss"] = torch.ones(())
    assert book[first].data_ptr() == group.unsharded[0].data_ptr()
    assert book["rope.cos"] is made.stages[0].rope.cos
    assert book["loss"].item() == 1


def test_a_parameter_that_a_gather_moves_counts_once_a_gather(axes: Axes) -> None:
    """All parameters of a group move with its buffer, and the first gather moves none."""
    made = trainer(axes)
    made.step(0)
    group = next(group for group in made.groups if group.name == "layers.1")
    assert group.num_moved == 0
    changes = made.pointer_changes()
    assert group.gathered is not None
    storage = group.gathered.untyped_storage()
    DEVICE.resize_storage(storage, 2 * storage.nbytes())
    made.step(1)
    sharing = [g for g in made.groups if g.gathered is not None
               and g.gathered.untyped_storage().data_ptr() == storage.data_ptr()]  # fmt: skip
    assert changes.count() == sum(len(g.unsharded) for g in sharing)
    made.step(2)
    assert changes.count() == 0


def test_what_is_replaced_between_steps_counts_and_is_named(axes: Axes) -> None:
    """Moments and buffers that the program replaced are counted once, by name."""
    made = trainer(axes)
    made.step(0)
    changes = made.pointer_changes()
    made.step(1)
    assert changes.count() == 0
    made.optimizer.exp_avg[2] = made.optimizer.exp_avg[2].clone()
    made.stages[0].rope.cos = made.stages[0].rope.cos.clone()
    assert changes.count() == 2
    assert sorted(changes.moved) == sorted(["rope.cos", f"{made.optimizer.names[2]} exp_avg"])
    assert changes.count() == 0


def test_a_pattern_that_means_nothing_is_refused(axes: Axes) -> None:
    """A run that would look into nothing says which pattern, not every module is called."""
    for taps in (("norm", "layers.7.attn"), ("layers:output",)):
        with pytest.raises(ConfigError, match="taps: expected a pattern that means a module"):
            trainer(axes, taps=taps)
    made = trainer(axes, taps=("layers.*:gradient", "**.norm", "layers.0.attn.norm:output"))
    assert made.taps.names == [
        f"{name}[{i}]"
        for name in (
            "layers.0:gradient", "layers.1:gradient", "layers.0.attn.norm:output",
            "layers.0.mlp.norm:output", "layers.1.attn.norm:output", "layers.1.mlp.norm:output",
        )
        for i in range(2 + 1)
    ]  # fmt: skip

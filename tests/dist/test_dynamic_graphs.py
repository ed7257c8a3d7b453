"""Graph banks of dynamic context parallelism in the trainer: groups that differ, and errors."""

import gc
import weakref
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from fsdp_core.data import PackedDocuments
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.graph.recorder import StaleAddress
from fsdp_core.model.batch import Capacity, Part
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from fsdp_core.train.inputs import PackInputs
from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import DEVICE, STEPS, WARMUP, Run, bits

Bits = list[tuple[Any, ...]]


def trainer_of(run: Run) -> Trainer:
    return Trainer(run.config, build_axes(run.parallel, DEVICE), DEVICE)


def inputs_of(trainer: Trainer) -> PackInputs:
    return cast("PackInputs", trainer._inputs)


# ---- groups that differ


class MixedDocuments(PackedDocuments):
    """Documents whose first ranks choose another size than the last ones in each microbatch."""

    def size(self, step: int, microbatch: int) -> int:
        """In turn: pairs on the left and single ranks on the right, and the other way round."""
        is_left = dist.get_rank() < dist.get_world_size() // 2
        return 2 if is_left == bool((step + microbatch) % 2) else 1


def train_mixed(runs: list[Run]) -> list[Bits]:
    """All steps of each run, with sizes that differ from group to group."""
    found = []
    for run in runs:
        trainer = trainer_of(run)
        inputs = inputs_of(trainer)
        plain = inputs._documents
        inputs._documents = MixedDocuments(*(getattr(plain, f.name) for f in fields(plain)))
        found.append([bits(trainer, step) for step in range(STEPS)])
        trainer.close()
    return found


# ---- what is refused


def _other_capacity(trainer: Trainer) -> Part:
    """A microbatch with room for more sequences than graphs were captured for."""
    inputs = inputs_of(trainer)
    capacity = inputs._capacities[1]
    wider = Capacity(tokens=capacity.tokens, slots=capacity.slots + 1, multiple=capacity.multiple)
    inputs._capacities[1] = wider
    part = inputs.samples()[1]
    inputs._capacities[1] = capacity
    return part


def _other_group(trainer: Trainer) -> Part:
    """A microbatch over a group that was made again, of the same ranks."""
    part = inputs_of(trainer).samples()[2]
    group = dist.new_group(dist.get_process_group_ranks(part.cp.group))
    assert isinstance(group, dist.ProcessGroup)
    return replace(part, cp=replace(part.cp, group=group))


def _forward(trainer: Trainer, part: Part, slot: int) -> str:
    """What a stage says to a microbatch; nothing if it takes it."""
    tokens = torch.zeros_like(part.targets)
    try:
        trainer.stages[0](tokens, part, microbatch=slot)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _waiting(trainer: Trainer) -> str:
    """What is said to a microbatch of another size in a slot whose own awaits its backward."""
    samples = inputs_of(trainer).samples()
    tokens = torch.zeros_like(samples[2].targets)
    loss = trainer.stages[0](tokens, samples[2], microbatch=0)
    message = _forward(trainer, samples[1], 0)
    del loss
    return message


def _between(trainer: Trainer, step: int) -> Any:
    """The loss of an evaluation, which replays nothing."""
    replays = trainer.counts.replays
    loss = trainer.evaluate(step)
    assert trainer.counts.replays == replays
    return [loss.item()]


def refused(run: Run) -> tuple[dict[str, str], Bits, Bits]:
    """What a captured trainer refuses, and its steps, beside those of eager training.

    Between steps there are evaluations, which no graph sees.
    """
    eager, trainer = trainer_of(replace(run, graph=())), trainer_of(run)
    seen, expected, messages = [], [], {}
    for step in range(STEPS):
        if step > WARMUP:
            part = inputs_of(trainer).samples()[1]
            messages = {
                "capacity": _forward(trainer, _other_capacity(trainer), 0),
                "slot": _forward(trainer, part, trainer._num_slots),
                "group": _forward(trainer, _other_group(trainer), 0),
                "waiting": _waiting(trainer),
            }
            seen.append(_between(trainer, step))
            expected.append(_between(eager, step))
        seen.append(bits(trainer, step))
        expected.append(bits(eager, step))
    trainer.close()
    return messages, seen, expected


# ---- a capture that fails


def failed_capture(run: Run) -> tuple[str, list[str], Bits, Bits]:
    """The last size cannot be captured: the message, what was left, and steps beside eager's."""
    eager = trainer_of(replace(run, graph=()))
    expected = [bits(eager, step) for step in range(STEPS)]
    trainer = trainer_of(run)
    attention: Any = next(iter(trainer.stages[-1].numbered_layers.values())).attn.attention
    plain = attention.forward

    def reads(x: torch.Tensor, part: Part) -> torch.Tensor:
        if part.cp.size == 1:
            x = x + 0.0 * x.sum().item()
        result: torch.Tensor = plain(x, part)
        return result

    seen = [bits(trainer, step) for step in range(WARMUP)]
    attention.forward = reads
    message, left = "", []
    try:
        trainer.step(WARMUP)
    except CaptureAborted as error:
        message = str(error)
    del attention.forward
    for stage in trainer.stages:
        left += ["on_microbatch"] * (stage.on_microbatch is not None)
        for name, module in stage.named_modules():
            left += [f"{name}.forward"] * ("forward" in vars(module))
    left += ["graphs"] * len(trainer._graphs.parts) + ["counts"] * trainer.counts.captured
    seen += [bits(trainer, step) for step in range(WARMUP, STEPS)]
    trainer.close()
    return message, left, seen, expected


# ---- tables


def lifetime_of_tables(run: Run) -> tuple[bool, str, bool]:
    """Tables are there while graphs are, a replay after the model's moved, and gone with them."""
    trainer = trainer_of(run)
    for step in range(WARMUP + 1):
        trainer.step(step)
    rope = trainer.stages[0].rope
    table = weakref.ref(rope.cos)
    # Away and back: the model's tables are new ones then.
    rope.to("meta")
    rope.to_empty(device="cpu")
    gc.collect()
    is_kept, message = table() is not None, ""
    try:
        trainer.step(WARMUP + 1)
    except StaleAddress as error:
        message = str(error)
    trainer.close()
    gc.collect()
    return is_kept, message, table() is None


ATTN, FRONT = ("attn",), ("attn", "moe_router", "moe_preprocess")
ONE: dict[str, Any] = {"layers": 1}
DENSE = "dense_tiny_dropout"


def test_groups_may_differ(warm_ranks: RankPool) -> None:
    """Two ranks on one size beside two on another, in one microbatch: no rank waits, same bits."""
    run = Run({"dp": 4, "dynamic_cp": (1, 2)}, "moe_tiny", ONE)
    runs = [run, replace(run, graph=FRONT)]
    for eager, graphed in warm_ranks.run(train_mixed, runs, world_size=4):
        assert graphed == eager
        assert len({str(step) for step in eager}) == STEPS


def test_what_was_not_captured_is_refused(warm_ranks: RankPool) -> None:
    """Other capacities, slots and groups raise, and training goes on as before, with evaluations in
    between."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, overrides=ONE, graph=ATTN)
    for messages, seen, expected in warm_ranks.run(refused, run, world_size=2):
        assert "ValueError: Expected plan." in messages["capacity"]
        assert ", as captured in graphs, got " in messages["capacity"]
        assert "ValueError: Expected at most 1 microbatches" in messages["slot"]
        assert "RuntimeError: Expected the process group that is kept" in messages["group"]
        assert "RuntimeError: Expected slot 0 to be free" in messages["waiting"]
        assert seen == expected


def test_a_failed_capture_leaves_no_bank(warm_ranks: RankPool) -> None:
    """The smallest size, the last, is refused: no graph of another is installed; a retry works."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, ONE, graph=ATTN)
    for message, left, seen, expected in warm_ranks.run(failed_capture, run, world_size=2):
        assert "_local_scalar_dense" in message
        assert left == []
        assert seen == expected


def test_tables_live_as_long_as_banks(warm_ranks: RankPool) -> None:
    """RoPE tables that a model replaced stay while graphs may read them, and no longer."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, ONE, graph=ATTN)
    for is_kept, message, is_gone in warm_ranks.run(lifetime_of_tables, run, world_size=2):
        assert is_kept
        assert "rope.cos: captured at" in message
        assert is_gone

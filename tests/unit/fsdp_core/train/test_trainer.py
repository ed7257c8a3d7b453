"""The trainer on one rank: what plain torch would train, and who is named."""

import gc
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.config import (
    POOLS,
    STRATEGIES,
    DataConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from fsdp_core.data import Batches, token_source
from fsdp_core.device import Device
from fsdp_core.graph.digest import digest_hex, digest_tensors, empty_rows
from fsdp_core.graph.digest_torch import INT_OF_SIZE, PATTERNS
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import init_weights
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.stress.races import ClockStream
from fsdp_core.train import Trainer, make_trainer
from fsdp_core.train.scopes import GraphCounts
from fsdp_core.train.taps import CallCopies, SnapshotArena, TensorCopies
from harness.records import COPIES, DIGEST_GROUPS, SAMPLES
from tests.support.dense_parts import dense_part
from tests.support.operators import Seeing

STEPS = 5
MODEL = ModelConfig(vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, seq=6)
# Losses of the router so large that what they are multiplied by shows in the gradient's norm.
EXPERTS = replace(
    MODEL, experts=4, top_k=2, expert_ffn=8, normalise_top_k=True, aux_loss=1.0, z_loss=1.0
)


def config(**options: Any) -> TrainConfig:
    values: dict[str, Any] = {"model": MODEL, "dtype": "fp32", "steps": STEPS, "microbatches": 2}
    return TrainConfig(**(values | options))


def plain_model(axes: Axes, seed: int, config: ModelConfig = MODEL) -> DecoderStage:
    streams = RandomStreams(0, (axes.tp,), torch.device("cpu"))
    model = DecoderStage(config, axes, LayerFactory(), streams)
    init_weights([model], seed, layers=config.layers, init_std=config.init_std)
    return model


def plain_training(axes: Axes, chosen: TrainConfig) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, by plain modules and torch's own optimizer."""
    model = plain_model(axes, chosen.seed, chosen.model)
    model.set_loss_scale(1 / 2)
    optim = chosen.optim
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    batches = Batches(token_source(DataConfig(), MODEL.vocab_size), chosen.seed, 0, 2, 1, MODEL.seq)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for tokens in batches.tokens(step):
            local = dense_part(tokens[:, :-1], tokens[:, 1:], axes.cp)
            loss = model(local.tokens, local.part)
            (loss / 2).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(parameters, optim.clip_grad_norm)
        optimizer.step()
        seen.append((sum(losses) / 2, norm.item()))
    return seen


@pytest.mark.parametrize("graph", [(), ("full_iteration",)])
def test_an_overflow_is_skipped_and_said(axes: Axes, graph: tuple[str, ...]) -> None:
    """Weights, moments and the count of steps stay; eagerly and where a graph has the update."""
    trainer = Trainer(config(skip_nonfinite=True, graph=graph), axes, Device("cpu"))
    overflow = torch.zeros_like(trainer.optimizer.grads[0])
    require = trainer._require_grads
    trainer._require_grads = lambda: (require(), trainer.optimizer.grads[0].add_(overflow))  # type: ignore[assignment,method-assign]
    said, counts, held = [], [], []
    for step in range(STEPS):
        overflow.fill_(torch.inf if step == 3 else 0.0)
        outputs = trainer.step(step)
        said.append(outputs.skipped.item())
        counts.append(trainer.optimizer.step_count.item())
        held.append(trainer.optimizer.params[0].clone())
    assert (said, counts) == ([0, 0, 0, 1, 0], [1, 2, 3, 3, 4])
    assert torch.equal(held[3], held[2])
    assert not torch.equal(held[4], held[3])
    trainer.close()


@pytest.mark.parametrize(
    ("strategy", "model"), [*((s, MODEL) for s in STRATEGIES), ("optim_grads_params", EXPERTS)]
)
def test_trains_as_plain_torch_does(axes: Axes, strategy: str, model: ModelConfig) -> None:
    """Losses and norms of five clipped steps follow a loop that shares no optimizer with ours."""
    chosen = config(
        model=model,
        optim=OptimConfig(lr=1e-2, clip_grad_norm=0.5),
        fsdp=FsdpConfig(strategy=strategy),
    )
    trainer = Trainer(chosen, axes, Device("cpu"))
    expected = plain_training(axes, chosen)
    for step, (loss, norm) in enumerate(expected):
        outputs = trainer.step(step)
        # Same gradients to the bit; AdamW and clipping round in another order: a few float32 ulps
        # of each weight a step, whose effect on a loss near 4 stays below 1e-5.
        assert outputs.loss.item() == pytest.approx(loss, rel=1e-5)
        assert outputs.grad_norm.item() == pytest.approx(norm, rel=1e-4)
        assert outputs.losses.mean().item() == outputs.loss.item()
    assert expected[0][1] > 0.5, "the clipping must clip"


@pytest.mark.parametrize(
    ("further", "options"),
    [
        (set(), {}),
        ({"buffers"}, {"model": EXPERTS}),
        ({COPIES}, {"dtype": "bf16", "fsdp": FsdpConfig(strategy="no_shard")}),
    ],
)
def test_digests_are_those_of_the_named_tensors(
    axes: Axes, further: set[str], options: dict[str, Any]
) -> None:
    """After a step each group's rows are its tensors' digests, and records know every group."""
    chosen = config(optim=OptimConfig(clip_grad_norm=0.0), **options)
    trainer = Trainer(chosen, axes, Device("cpu"))
    outputs = trainer.step(0)
    assert {*outputs.digests, "rng"} == {*DIGEST_GROUPS, SAMPLES, *further}
    for group, (names, tensors) in trainer.digested.items():
        rows = empty_rows(len(names), "cpu")
        digest_tensors(tensors, rows)
        assert digest_hex(rows) == digest_hex(outputs.digests[group]), group
        assert len(set(names)) == len(names) == len(tensors)


@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("graph", [(), ("attn",), ("full_iteration",)])
def test_a_gathered_copy_does_not_outlive_the_update(
    axes: Axes, graph: tuple[str, ...], *, reshards: bool
) -> None:
    """What was gathered is never computed with again: why it needs no digest."""
    fsdp = FsdpConfig(reshard_after_forward=reshards)
    chosen = config(dtype="bf16", graph=graph, fsdp=fsdp, model=replace(MODEL, layers=1))
    spoiled, plain = (Trainer(chosen, axes, Device("cpu")) for _ in range(2))
    for step in range(4):  # captured in step 2
        for group in spoiled.groups:
            assert not list(group.copies_at_rest())
            assert (group.gathered is None) == (step == 0)
            if group.gathered is not None:
                group.gathered.fill_(torch.nan)
        ours, theirs = spoiled.step(step), plain.step(step)
        assert torch.equal(ours.losses, theirs.losses)
        for name, rows in ours.digests.items():
            assert torch.equal(rows, theirs.digests[name]), (step, name)
    spoiled.close()
    plain.close()


def test_a_parameter_without_gradient_is_refused(axes: Axes) -> None:
    """A kept gradient of the step before must not update a parameter that got none in this one."""
    trainer = Trainer(config(), axes, Device("cpu"))
    trainer.step(0)
    norm = trainer.stages[0].norm
    assert norm is not None
    norm.register_forward_hook(lambda module, args, out: args[0])
    with pytest.raises(RuntimeError, match=r"Expected a gradient of norm\.weight, got none"):
        trainer.step(1)


@pytest.mark.parametrize("pool", POOLS)
def test_every_long_lived_tensor_has_a_name(axes: Axes, pool: str) -> None:
    """A captured iteration uses no storage that the trainer cannot name."""
    chosen = config(graph=("full_iteration",), fsdp=FsdpConfig(pool=pool))
    trainer = Trainer(chosen, axes, Device("cpu"))
    for step in range(3):
        trainer.step(step)
    assert trainer.counts.unnamed_externals == 0
    assert trainer.counts.external_places == []
    assert {"tokens", "lr", "step_count", "loss", "rope.cos"} <= set(trainer.counts.external_names)
    trainer.close()


@pytest.mark.parametrize("graph", [(), ("attn",), ("full_iteration",)])
def test_a_dropped_model_is_gone(axes: Axes, graph: tuple[str, ...]) -> None:
    """Nothing holds a closed trainer's model but its owner: no hook, no graph, no cycle."""
    trainer = Trainer(config(graph=graph), axes, Device("cpu"))
    for step in range(3):
        trainer.step(step)
    trainer.close()
    model = trainer.stages[0]
    held: list[weakref.ref[Any]] = [weakref.ref(model)]
    held += [weakref.ref(parameter) for parameter in model.parameters()]
    del trainer, model
    gc.collect()
    assert [each() for each in held if each() is not None] == []


def test_axes_of_another_layout_are_refused(axes: Axes) -> None:
    """Stages cut for one layout are not trained as another."""
    with pytest.raises(ValueError, match="Expected axes with cp=2, as configured, got 1"):
        Trainer(
            config(model=replace(MODEL, seq=8), parallel=ParallelConfig(cp=2)), axes, Device("cpu")
        )


def test_unnamed_memory_of_every_graph_counts() -> None:
    """A storage that nobody names is seen whichever graph uses it, at whichever capture."""
    counts = GraphCounts()
    found: list[Any] = [
        SimpleNamespace(names=["a"], places=["mm"], num_unnamed=2),
        SimpleNamespace(names=["b"], places=[], num_unnamed=1),
        SimpleNamespace(names=[], places=["add"], num_unnamed=0),
    ]
    counts.enter(found[:2])
    counts.enter(found[2:])
    assert counts.external_names == ["a", "b"]
    assert counts.external_places == ["mm", "add"]
    assert counts.unnamed_externals == 3


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", PATTERNS, ids=str)
def test_every_bit_of_every_type_is_kept(dtype: torch.dtype) -> None:
    """All patterns of bytes, NaN payloads among them, of a tensor that is not contiguous."""
    raw = torch.arange(1024, dtype=torch.int64).to(torch.uint8)
    tensor = raw.view(dtype).view(8, -1).t()
    copies = TensorCopies({"x": tensor}, SnapshotArena(1 << 12, CPU))
    copies.take([("other", tensor), ("x", tensor)])
    ((name, copy),) = copies.read()
    assert (name, copy.dtype, copy.shape) == ("x", dtype, tensor.shape)
    whole = INT_OF_SIZE[dtype.itemsize]
    assert torch.equal(copy.view(whole), tensor.view(whole))
    assert copy.data_ptr() != tensor.data_ptr()


def test_the_call_that_was_asked_for_is_kept_whatever_its_shape() -> None:
    """Calls of growing, shrinking and equal shapes, step after step: each row has its own call."""
    wanted = {(0, 0): "x:output[0]", (0, 1): "x:output[1]"}
    calls, seen = CallCopies(wanted, SnapshotArena(1 << 12, CPU)), torch.zeros(2).int()
    for sizes in ((4, 7), (7, 4), (9, 2), (3, 3), (2, 9)):
        calls.begin()
        seen.zero_()
        given = [torch.randn(size) for size in sizes]
        for tensor in given:
            calls.record(0, seen[0], [tensor, tensor[:1].bool()])
            calls.record(1, seen[1], [torch.ones(3)])
            seen.add_(1)
        found = dict(calls.read())
        assert list(found) == list(wanted.values())
        for tensor, (kept, flag) in zip(given, found.values(), strict=True):
            assert torch.equal(kept, tensor)
            assert torch.equal(flag, tensor[:1].bool())


def test_a_row_without_a_call_in_this_step_has_nothing() -> None:
    """What a step before has written is not passed off as this step's."""
    calls, seen = CallCopies({(0, 0): "x:output[0]"}, SnapshotArena(64, CPU)), torch.zeros(1).int()
    calls.begin()
    calls.record(0, seen[0], [torch.ones(2)])
    assert len(list(calls.read())) == 1
    calls.begin()
    assert list(calls.read()) == []


def test_there_is_room_for_so_many_bytes_and_no_more() -> None:
    """The last byte fits; one more is refused with both numbers and the name."""
    room = SnapshotArena(8, CPU)
    TensorCopies({"a": torch.zeros(2)}, room)
    with pytest.raises(ValueError, match="at most 8 bytes on a rank, got 9 with b"):
        TensorCopies({"b": torch.zeros(1, dtype=torch.bool)}, room)


pytestmark = pytest.mark.usefixtures("mesh", "determinism_as_before")
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


@pytest.fixture
def trainer(axes: Axes, mesh: DeviceMesh) -> Iterator[Trainer]:
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
    seen: set[str] = set()

    def see(*_: Any) -> None:
        stream = trainer.device.current_stream()
        seen.add(stream.name if isinstance(stream, ClockStream) else "no stress")

    for method, arguments in WORK.items():
        seen.clear()
        with Seeing(see):
            getattr(trainer, method)(**arguments)
        assert seen <= {"main", "gather", "reduce"}, method
        assert seen or method == "close"
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

"""The trainer on one rank: what plain torch would train, and who is named."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

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
from fsdp_core.model.batch import dense_part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.train import Trainer
from harness.records import COPIES, DIGEST_GROUPS, SAMPLES

STEPS = 5
MODEL = ModelConfig(vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, seq=6)

# Losses of the router so large that what they are multiplied by shows in the gradient's norm.
EXPERTS = replace(
    MODEL, experts=4, top_k=2, expert_ffn=8, normalise_top_k=True, aux_loss=1.0, z_loss=1.0
)


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """Put back the switches that a trainer sets."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def config(**options: Any) -> TrainConfig:
    """A tiny float32 run of two microbatches."""
    values: dict[str, Any] = {"model": MODEL, "dtype": "fp32", "steps": STEPS, "microbatches": 2}
    return TrainConfig(**(values | options))


def plain_model(axes: Axes, seed: int, config: ModelConfig = MODEL) -> DecoderStage:
    """The decoder that nobody has wrapped."""
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
    """After a step each group's rows are its tensors' digests, and records know every group.

    Losses of routers are buffers; copies of weights are digested where a rank keeps them.
    """
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
    chosen = config(dtype="bf16", graph=graph, fsdp=fsdp)
    spoiled, plain = (Trainer(chosen, axes, Device("cpu")) for _ in range(2))
    for step in range(STEPS):
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


def test_wrapping_leaves_the_initial_bits(axes: Axes) -> None:
    """The trainer's first weights are the decoder's own, whatever FSDP does with them."""
    plain = dict(plain_model(axes, 1234).named_parameters())
    trainer = Trainer(config(), axes, Device("cpu"))
    names, tensors = trainer.digested["weights"]
    assert set(names) == set(plain)
    for name, tensor in zip(names, tensors, strict=True):
        assert torch.equal(tensor, plain[name]), name


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
    for step in range(STEPS):
        trainer.step(step)
    assert trainer.counts.unnamed_externals == 0
    assert trainer.counts.external_places == []
    assert {"tokens", "lr", "step_count", "loss", "rope.cos"} <= set(trainer.counts.external_names)
    trainer.close()


@pytest.mark.parametrize("graph", [("attn",), ("full_iteration",)])
def test_close_leaves_an_eager_trainer(axes: Axes, graph: tuple[str, ...]) -> None:
    """After `close` no graph is left, and closing twice is harmless."""
    trainer = Trainer(config(graph=graph), axes, Device("cpu"))
    for step in range(4):
        trainer.step(step)
    replays = trainer.counts.replays
    assert replays > 0
    trainer.close()
    trainer.close()
    trainer.step(4)
    assert trainer.counts.replays == replays


@pytest.mark.parametrize("graph", [("attn",), ("full_iteration",)])
def test_no_graph_is_captured_before_the_warm_up_is_over(
    axes: Axes, graph: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for it: a capture needs what whole steps make first."""
    trainer = Trainer(config(graph=graph), axes, Device("cpu"))
    monkeypatch.setattr(trainer, "_is_capture_due", lambda index: True)
    with pytest.raises(RuntimeError, match=r"warm-up of 2 whole steps .* got 0"):
        trainer.step(0)
    assert trainer.counts.captured == 0
    trainer.close()


@pytest.mark.parametrize("graph", [(), ("attn",), ("full_iteration",)])
def test_a_dropped_model_is_gone(axes: Axes, graph: tuple[str, ...]) -> None:
    """Nothing holds a closed trainer's model but its owner: no hook, no graph, no cycle."""
    trainer = Trainer(config(graph=graph), axes, Device("cpu"))
    for step in range(4):
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

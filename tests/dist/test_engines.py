"""Other engines: digests are of their own memory, and what they cannot do is refused.

That they have our bits is shown by `scenarios/pr.yaml::engines`."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.config import TrainConfig
from fsdp_core.graph import library_graphs
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.graph.digest import digest_tensors, empty_rows
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer, make_trainer
from tests.dist.library_graphs_stand_in import stood_in
from tests.dist.rank_pool import RankError, RankPool
from tests.dist.scope_programs import CAPACITY, MIXED, STEPS, WARMUP, Scoped, act, train_all
from tests.dist.train_layout_programs import DEVICE, Run


def look_at_memory(run: TrainConfig) -> None:
    """Digests are of what the engine computes with: a write to it shows."""
    trainer = _made(run)
    trainer.step(0)
    held = dict(trainer.stages[0].named_parameters())
    names = trainer.digested["weights"][0]
    locals_ = [_local(held[name]) for name in names]
    own = empty_rows(len(names), "cpu")
    digest_tensors(locals_, own)
    assert torch.equal(own, trainer.outputs.digests["weights"])
    trainer.digested["weights"][1][0].view(-1)[:1].add_(1.0)  # as a planted fault does
    trainer.redigest_state()
    changed = (trainer.outputs.digests["weights"] != own).any(dim=1)
    digest_tensors(locals_, own)
    assert torch.equal(own, trainer.outputs.digests["weights"])
    assert changed.tolist() == [True] + [False] * (len(names) - 1)
    counts = trainer.digested["optim"][1][-1]
    assert counts.item() == 1.0
    trainer.close()


def refused(run: TrainConfig) -> list[str]:
    """What a trainer says to an evaluation."""
    trainer, told = _made(run), []
    try:
        trainer.evaluate(0)
    except NotImplementedError as error:
        told.append(str(error))
    trainer.close()
    return told


def make(run: TrainConfig) -> None:
    _made(run).close()


def _made(config: TrainConfig) -> Trainer:
    return make_trainer(config, build_axes(config.parallel, DEVICE), DEVICE)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()


def by(engine: str) -> TrainConfig:
    """A run of two ranks by an engine."""
    return replace(Run({"dp": 2}).config, engine=engine)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_digests_are_of_what_the_engine_computes_with(engine: str, warm_ranks: RankPool) -> None:
    """Not of copies: names, bits and a write to one of them."""
    warm_ranks.run(look_at_memory, by(engine), world_size=2)


def test_what_is_not_there_is_refused(warm_ranks: RankPool) -> None:
    """megatron-fsdp without a GPU; evaluation by another engine."""
    with pytest.raises(RankError, match="engine megatron_fsdp needs a GPU") as caught:
        warm_ranks.run(make, by("megatron_fsdp"), world_size=2)
    assert caught.value.kind == "BackendMissing"
    told = warm_ranks.run(refused, by("fsdp2"), world_size=2)[0]
    assert [text.endswith("got fsdp2.") for text in told] == [True]


# --- partial scopes captured by libraries, over their stand-ins: each bit of each step is eager's -


FAILING_CALL = {
    "te": {"warm-up": 1, "capture": 3, "backward": 0},
    "torch": {"warm-up": 2, "capture": 4, "backward": 0},
}
"""Of the last layer's attention: for torch's maker it runs once before."""


def _fail(*_: object) -> None:
    raise ZeroDivisionError("told to")


class Failing:
    """A module's forward that fails at one call; 0: in the backward of its first."""

    def __init__(self, plain: Any, call: int) -> None:
        self.plain, self.left = plain, call

    def __call__(self, x: torch.Tensor, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            _fail()
        out = self.plain(x, *args)
        if self.left == -1 and out.requires_grad:
            out.register_hook(_fail)
        return out


def traces(trainer: Trainer) -> list[Any]:
    """What a capture could leave on modules."""
    found: list[Any] = [gc.isenabled(), library_graphs._Callee.__call__ is nn.Module.__call__]
    for stage in trainer.stages:
        for name, module in stage.named_modules():
            found.append((name, "forward" in vars(module), len(module._forward_hooks)))
            found += [p.grad is None for p in module.parameters(recurse=False)]
    return found


def fail_and_try_again(scoped: Scoped, where: str) -> tuple[str, list[Any], list[Any]]:
    """The error, what of the first attempt is left, and the bits of all steps."""
    trainer = Trainer(scoped.config, build_axes(scoped.run.parallel, DEVICE), DEVICE)
    with stood_in() as te:
        bits = [act(trainer, ("step", index)) for index in range(WARMUP)]
        attention: Any = trainer.stages[-1].get_submodule("layers.1.attn.attention")
        before, text = traces(trainer), ""
        attention.forward = Failing(attention.forward, FAILING_CALL[scoped.capture_by][where])
        try:
            trainer.step(WARMUP)
        except CaptureAborted as error:
            text = str(error)
        del attention.forward
        after = [*traces(trainer), te.is_capturing]
        left = [pair for pair in zip([*before, False], after, strict=True) if pair[0] != pair[1]]
        bits += [act(trainer, ("step", index)) for index in range(WARMUP, STEPS)]
        assert trainer.counts.captured
    trainer.close()
    return text, left, bits


LIBRARIES = ("te", "torch")
PARTS = ("attn", "mlp", "moe_router", "moe_preprocess")
EXPERTS = ("moe_tiny", MIXED | CAPACITY)
DENSE = "dense_tiny_dropout"
RUNS: dict[str, tuple[Run, list[tuple[str, ...]]]] = {
    "every scope": (Run({"dp": 2, "ep": 2}, *EXPERTS), [PARTS, ("attn", "moe"), ("layer",)]),
    "tp": (Run({"tp": 2, "sequence_parallel": True}, DENSE), [("attn", "mlp")]),
    "two slots": (Run({"pp": 2}, DENSE, microbatches=4), [("attn",)]),
    "context sizes": (Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, {"layers": 1}), [("attn",)]),
    "weights stay": (Run({"dp": 2}, DENSE, fsdp={"strategy": "optim_grads", "pool": "dynamic"}),
                     [("layer",)]),
    "traced pool": (Run({"dp": 2}, DENSE, fsdp={"pool": "traced"}), [("attn", "mlp")]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_graphs_of_libraries_have_the_bits_of_eager(name: str, warm_ranks: RankPool) -> None:
    """On every kind of scope and layout, with as many graphs and launches as ours."""
    run, scopes = RUNS[name]
    makers = ("ours", *LIBRARIES)
    graphed = [Scoped(run, scope, capture_by=by) for scope in scopes for by in makers]
    runs = [Scoped(run), *graphed]
    for eager, *found in warm_ranks.run(train_all, runs, world_size=run.parallel.world_size):
        assert eager.bits[0] != eager.bits[1]
        for scoped, seen in zip(graphed, found, strict=True):
            assert seen.bits == eager.bits, (scoped.capture_by, scoped.graph)
        for number in range(0, len(found), len(makers)):
            counts = {(each.captured, each.replays) for each in found[number : number + 3]}
            assert len(counts) == 1, "each maker captures and replays as much"
            assert min(counts.pop()) > 0


@pytest.mark.parametrize("where", ["warm-up", "capture", "backward"])
@pytest.mark.parametrize("by", LIBRARIES)
def test_a_failed_capture_leaves_everything_as_it_was(
    by: str, where: str, warm_ranks: RankPool
) -> None:
    """All ranks say why, hooks and classes are as before, and the capture may be tried again."""
    scoped = Scoped(Run({"dp": 2}, DENSE), ("attn", "mlp"), capture_by=by)
    expected = warm_ranks.run(train_all, [Scoped(scoped.run)], world_size=2)
    ranks = warm_ranks.run(fail_and_try_again, scoped, where, world_size=2)
    for (text, traces, bits), (eager,) in zip(ranks, expected, strict=True):
        assert "given up on every rank: rank 0: ZeroDivisionError: told to" in text
        assert traces == []
        assert bits == eager.bits

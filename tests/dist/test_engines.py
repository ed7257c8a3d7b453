"""Other engines: digests are of their own memory, and what they cannot do is refused.

That they have our bits is shown by `scenarios/pr.yaml::engines`.
"""

from dataclasses import replace

import pytest
import torch

from fsdp_core.config import TrainConfig
from fsdp_core.graph.digest import digest_tensors, empty_rows
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer, make_trainer
from tests.dist.rank_pool import RankError, RankPool
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

"""Train the Llama 3 debug model of torchtitan on random tokens, without a tokenizer or a data set.

Planted difference: --plant-step S --plant-rank R changes one input token of microbatch 1.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

VOCABULARY, LENGTH, BATCH = 2048, 64, 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2, help="at most 6")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--reshard", choices=("default", "always", "never"), default="default")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--optimizer", choices=("for-loop", "foreach", "fused"), default="foreach")
    parser.add_argument("--chunked-loss", action=on_off, default=True)
    parser.add_argument("--graphs", action=on_off, default=False, help="CUDA graphs, on GPUs")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plant-step", type=int, default=-1)
    parser.add_argument("--plant-rank", type=int, default=0)
    return parser.parse_args()


ARGS = parse_args()
if ARGS.device == "cpu" or not torch.cuda.is_available():
    # torchtitan asks torch for an accelerator when it is imported, and takes "cuda" without one.
    torch._utils._get_available_device_type = lambda: "cpu"
    if importlib.util.find_spec("triton") is None:  # imported for a dispatcher that is not used
        sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.utils import device_type  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class RandomTokens(BaseDataLoader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_rank: int, **kwargs: Any) -> None:
        self.generator = torch.Generator().manual_seed(ARGS.seed + 1000 * (dp_rank + 1))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        planted = ARGS.plant_step * ARGS.microbatches + 1 if ARGS.plant_step >= 0 else -1
        batch = 0
        while True:
            size = (BATCH, LENGTH + 1)
            tokens = torch.randint(VOCABULARY, size, generator=self.generator)
            inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
            if batch == planted and dist.get_rank() == ARGS.plant_rank:
                inputs[0, 0] ^= 1
            batch += 1
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])


class PrintingTrainer(Trainer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        pass

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().forward_backward_step(**kwargs)
        rank, step = dist.get_rank(), self.step - 1
        print(f"rank {rank} step {step} loss {float(loss).hex()}", flush=True)
        return loss


def configure(folder: str) -> Any:
    """The debug model's configuration, made small, on random tokens."""
    base = llama3_debugmodel()
    layers = base.model_spec.model.layers = base.model_spec.model.layers[: ARGS.layers]
    if device_type == "cpu":  # which has no peaks of memory, and no backward of flex attention
        metrics.build_device_memory_monitor = lambda: SimpleNamespace(
            device_name="cpu",
            reset_peak_stats=lambda: None,
            get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6),
        )
        utils.set_pg_timeouts = lambda **_: None
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    base.tokenizer, base.dataloader = NoTokenizer.Config(), RandomTokens.Config()
    base.dump_folder = folder
    recompute = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    base.activation_checkpoint = recompute[ARGS.recompute]
    if not ARGS.chunked_loss:
        base.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    base.optimizer.implementation = ARGS.optimizer
    base.optimizer.param_groups[0].optimizer_kwargs["lr"] = ARGS.lr
    base.lr_scheduler.warmup_steps = 0
    base.parallelism.fsdp_reshard_after_forward = ARGS.reshard
    base.parallelism.spmd_backend = "partial_dtensor"  # the others need a later torch
    base.parallelism.tensor_parallel_degree = ARGS.tensor_parallel
    base.training.disable_cuda_graphs = not ARGS.graphs
    base.training.steps, base.training.seq_len = ARGS.steps, LENGTH
    base.training.local_batch_size = BATCH
    ranks = int(os.environ["WORLD_SIZE"]) // ARGS.tensor_parallel
    base.training.global_batch_size = BATCH * ARGS.microbatches * ranks
    base.debug.seed, base.debug.deterministic = ARGS.seed, True
    base.debug.enable_structured_logging = False
    return PrintingTrainer.Config(**{f.name: getattr(base, f.name) for f in fields(base)})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = configure(folder).build()
        for part in trainer.model_parts:
            for unit in part.modules():
                if isinstance(unit, FSDPModule) and device_type == "cpu":
                    unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""Train a small model on sums of gradients; after two eager steps, replays of one captured step.

With a GPU the graph is torch's, else the host's. Planted: the input of step 3 is not copied into
the static one on the last rank; a buffer is replaced after the capture; nothing is captured at all.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from harness.recorder.capture import CUDAGraph, graph

MODES = ("eager", "graph", "stale_input", "replaced_buffer", "nothing")
WARM_UP = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale)


def start() -> torch.device:
    """Join the process group that torchrun describes; return this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(0))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.cuda.set_stream(torch.cuda.Stream())  # a capture cannot be on the default one
    return device


def main(*, steps: int = 6, mode: str = "eager") -> None:
    device = start()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(1)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    torch.manual_seed(2 + rank)  # every rank drops other elements
    static = torch.zeros(8, 16, device=device)

    def train() -> None:
        optimizer.zero_grad()
        model(static).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    stream = torch.cuda.current_stream() if device.type == "cuda" else None
    captured = None
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        if (mode, step, rank) != ("stale_input", 3, last):
            static.copy_(torch.randn(8, 16, generator=generator))
        if step == WARM_UP and mode not in ("eager", "nothing"):
            captured = CUDAGraph()
            # NCCL's watchdog thread asks for events meanwhile.
            with graph(captured, stream=stream, capture_error_mode="thread_local"):
                train()
        if mode == "replaced_buffer" and step == 4:
            model.scale = model.scale.clone()
        if captured is None:
            train()
        else:
            captured.replay()
    if captured is not None:
        captured.reset()  # before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--mode", choices=MODES, default="eager")
    main(**vars(parser.parse_args()))

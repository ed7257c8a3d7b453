"""TransformerEngine #2937: graphed modules hand out the same gradient buffer at each replay.

https://github.com/NVIDIA/TransformerEngine/pull/2937 (merged in July 2026 with an argument that
keeps the old behaviour). The next microbatch's replay overwrites the gradient that the first one
left with the parameter, so the sum is of other gradients than it should be. Nothing is raised.

    torchrun --nproc-per-node 1 transformer_engine_2937.py
    torchrun --nproc-per-node 1 transformer_engine_2937.py --graph
    torchrun --nproc-per-node 1 transformer_engine_2937.py --graph --no-clone

Graphs must change no bit, and do not with `--microbatches 1`. One GPU.
"""

import argparse
import importlib
import inspect
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from torch import nn

HIDDEN, BATCH = 256, 32
ARGUMENTS = ("clone_param_grads_on_return", "_clone_param_grads_on_return")


def graphed(te: Any, model: nn.Module, device: torch.device, *, clones: bool) -> Any:
    """`model` captured; releases that cannot clone gradients are asked for nothing."""
    make = te.make_graphed_callables
    known = [name for name in ARGUMENTS if name in inspect.signature(make).parameters]
    sample = torch.zeros(BATCH, HIDDEN, device=device)
    return make(model, (sample,), **dict.fromkeys(known[:1], clones))


def main() -> None:
    """Train, and print the norm of the gradient that each step took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--graph", action="store_true", help="capture forward and backward")
    parser.add_argument("--no-clone", action="store_true", help="as releases before the fix")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(1234)
    te: Any = importlib.import_module("transformer_engine.pytorch")
    model: nn.Module = te.Linear(HIDDEN, HIDDEN, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train: Any = model
    if options.graph:
        train = graphed(te, model, device, clones=not options.no_clone)
    data = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros(())
        for _ in range(options.microbatches):
            x, target = (torch.randn(BATCH, HIDDEN, generator=data).to(device) for _ in range(2))
            loss = nn.functional.mse_loss(train(x), target) / options.microbatches
            loss.backward()
        print(f"step {step}: loss {loss.item():.9f}")
        optimizer.step()


if __name__ == "__main__":
    main()

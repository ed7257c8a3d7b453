"""Lightning #19987: the last gradients of an epoch are too small where it does not divide evenly.

https://github.com/Lightning-AI/pytorch-lightning/issues/19987 (open). An epoch's last window of
accumulation may hold fewer microbatches; their losses are divided by the number that was asked for.

    torchrun --nproc-per-node 1 lightning_19987.py --loop torch
    torchrun --nproc-per-node 1 lightning_19987.py --loop lightning

`torch` divides by what a window holds: losses must agree to rounding, and do with `--batches 8`.
"""

import argparse
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, BATCH, WINDOW = 16, 8, 4


def batches(number: int) -> DataLoader[Any]:
    """The same data in the same order every time."""
    data = torch.Generator().manual_seed(0)
    x = torch.randn(number * BATCH, FEATURES, generator=data)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)


def windows(number: int) -> Iterator[list[Any]]:
    """Microbatches of one update each."""
    held = list(batches(number))
    for first in range(0, number, WINDOW):
        yield held[first : first + WINDOW]


def by_hand(model: nn.Module, number: int, epochs: int) -> None:
    """What accumulation stands for: the mean over the microbatches of a window."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for window in windows(number):
            for x, target in window:
                (nn.functional.mse_loss(model(x), target) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


def by_lightning(model: nn.Module, number: int, epochs: int) -> None:
    """The same by a trainer."""
    lightning: Any = importlib.import_module("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, target = batch
            return nn.functional.mse_loss(self.model(x), target)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.05)

    trainer = lightning.Trainer(
        max_epochs=epochs, accumulate_grad_batches=WINDOW, accelerator="cpu", devices=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Task(), batches(number))


def main() -> None:
    """Train one of the two ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=6, help="microbatches an epoch")
    parser.add_argument("--loop", choices=["torch", "lightning"], default="torch")
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
    train = by_hand if options.loop == "torch" else by_lightning
    train(model, options.batches, options.epochs)


if __name__ == "__main__":
    main()

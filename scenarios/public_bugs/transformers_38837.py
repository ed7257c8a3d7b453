"""transformers #38837: an epoch's last gradients are too small where it does not divide evenly.

https://github.com/huggingface/transformers/issues/38837. The Trainer divides a microbatch's loss by
`gradient_accumulation_steps`, also where the epoch's last window of accumulation holds fewer.

    torchrun --nproc-per-node 1 transformers_38837.py --loop torch
    torchrun --nproc-per-node 1 transformers_38837.py --loop trainer

`torch` divides by what a window holds: losses must agree to rounding, and do with `--batches 8`.
Both clip gradients alike, at a norm that none reaches, so they differ in accumulation alone.
"""

import argparse
import importlib
import tempfile
from typing import Any

import torch
from torch import nn

FEATURES, BATCH, WINDOW = 16, 8, 4
LEARNING_RATE, MAX_NORM = 0.05, 1e3


class Model(nn.Module):
    """A regression that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """[n, FEATURES] and [n, 1] to a loss."""
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def rows(number: int) -> list[dict[str, torch.Tensor]]:
    """Data for so many microbatches."""
    x = torch.randn(number * BATCH, FEATURES, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]


def together(held: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows as a microbatch."""
    return {name: torch.stack([row[name] for row in held]) for name in held[0]}


def by_hand(model: Model, number: int, epochs: int) -> None:
    """What accumulation stands for: the mean over the microbatches of a window."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = rows(number)
    held = [together(data[first : first + BATCH]) for first in range(0, len(data), BATCH)]
    for _ in range(epochs):
        for first in range(0, number, WINDOW):
            window = held[first : first + WINDOW]
            for batch in window:
                (model(**batch)["loss"] / len(window)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def by_trainer(model: Model, number: int, epochs: int) -> None:
    """The same by a trainer."""
    api: Any = importlib.import_module("transformers")

    class InOrder(api.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = api.TrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=epochs, learning_rate=LEARNING_RATE,
        per_device_train_batch_size=BATCH, gradient_accumulation_steps=WINDOW, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=MAX_NORM, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    InOrder(model, arguments, data_collator=together, train_dataset=rows(number)).train()


def main() -> None:
    """Train one of the two ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=6, help="microbatches an epoch")
    parser.add_argument("--loop", choices=["torch", "trainer"], default="torch")
    options = parser.parse_args()

    torch.manual_seed(0)
    train = by_hand if options.loop == "torch" else by_trainer
    train(Model(), options.batches, options.epochs)


if __name__ == "__main__":
    main()

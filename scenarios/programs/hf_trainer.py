"""Train a small random Llama with the Trainer of Hugging Face transformers.

Planted difference: --plant-step S --plant-rank R changes one input token of microbatch 1.
"""

import argparse
import os
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH, BATCH = 256, 32, 2


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PlantingTrainer(Trainer):  # type: ignore[misc]
    """Prints each microbatch's loss; changes a token where --plant-step says."""

    plant: tuple[int, int] = (-1, 0)
    microbatch = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        step, rank = self.state.global_step, self.args.process_index
        if (step, rank) == self.plant and self.microbatch == 1:
            inputs["input_ids"] = inputs["input_ids"].clone()
            inputs["input_ids"][0, 0] ^= 1
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        print(f"rank {rank} step {step}.{self.microbatch} loss {float(loss).hex()}", flush=True)
        self.microbatch = (self.microbatch + 1) % self.args.gradient_accumulation_steps
        return loss


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gradient-checkpointing", action=on_off, default=False)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    parser.add_argument("--bf16", action=on_off, default=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plant-step", type=int, default=-1)
    parser.add_argument("--plant-rank", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        attn_implementation=args.attention,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=args.microbatches,
            gradient_checkpointing=args.gradient_checkpointing,
            learning_rate=args.lr,
            bf16=args.bf16,
            use_cpu=args.device == "cpu" or not torch.cuda.is_available(),
            seed=args.seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = RandomTokens(args.steps * args.microbatches * BATCH * 8, args.seed)
        trainer = PlantingTrainer(LlamaForCausalLM(config), arguments, train_dataset=data)
        trainer.plant = (args.plant_step, args.plant_rank)
        trainer.train()


if __name__ == "__main__":
    main()

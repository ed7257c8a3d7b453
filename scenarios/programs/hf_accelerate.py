"""Train a small random Llama of transformers in a loop of Hugging Face Accelerate.

Planted difference: --plant-step S --plant-rank R changes one input token of microbatch 1.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, BATCH = 256, 32, 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gradient-checkpointing", action=on_off, default=False)
    parser.add_argument("--dispatch-batches", action=on_off, default=False)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    parser.add_argument("--bf16", action=on_off, default=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plant-step", type=int, default=-1)
    parser.add_argument("--plant-rank", type=int, default=0)
    return parser.parse_args()


def build(args: argparse.Namespace) -> LlamaForCausalLM:
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
    model = LlamaForCausalLM(config)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def main() -> None:
    args = parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    accelerator = Accelerator(
        cpu=args.device == "cpu" or not torch.cuda.is_available(),
        gradient_accumulation_steps=args.microbatches,
        mixed_precision="bf16" if args.bf16 else "no",
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=args.dispatch_batches),
    )
    rank = accelerator.process_index
    set_seed(args.seed)
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
    size = args.steps * args.microbatches * BATCH * accelerator.num_processes
    tokens = torch.randint(VOCABULARY, (size, LENGTH))
    loader = DataLoader(tokens, BATCH, shuffle=True)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, batch in enumerate(loader):
        step, microbatch = divmod(index, args.microbatches)
        inputs = batch.clone()
        if (step, rank, microbatch) == (args.plant_step, args.plant_rank, 1):
            inputs[0, 0] ^= 1
        with accelerator.accumulate(model):
            loss = model(input_ids=inputs, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
        print(f"rank {rank} step {step}.{microbatch} loss {float(loss).hex()}", flush=True)


if __name__ == "__main__":
    main()

"""Train a small GPT of megatron-core with its data parallelism, schedule, optimizer and graphs.

Planted difference: --plant-step S --plant-rank R changes one input token of microbatch 1.
"""

import argparse
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

VOCABULARY, LENGTH, BATCH = 256, 32, 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--spec", choices=("local", "te"), default=None)
    parser.add_argument(
        "--cuda-graph", choices=("none", "local", "transformer_engine"), default="none"
    )
    parser.add_argument("--graph-warmup", type=int, default=2, help="steps before the capture")
    parser.add_argument("--distributed-optimizer", action=on_off, default=False)
    parser.add_argument("--max-norm", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--overlap", action=on_off, default=False)
    parser.add_argument("--bucket-size", type=int, default=None, help="elements")
    parser.add_argument("--recompute", action=on_off, default=False)
    parser.add_argument("--bf16", action=on_off, default=False)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plant-step", type=int, default=-1)
    parser.add_argument("--plant-rank", type=int, default=0)
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.spec = args.spec or ("te" if args.device == "cuda" else "local")
    gpu = args.spec == "te" or args.cuda_graph != "none" or args.recompute
    if args.device == "cpu" and gpu:
        parser.error("--spec te, --cuda-graph and --recompute need a GPU")
    return args


class OnCpu(TorchFunctionMode):
    """megatron-core names the device "cuda" in its code: means the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def start(args: argparse.Namespace) -> None:
    """Join the process group, then the groups of megatron-core, and seed."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel)
    ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(
        dist.get_rank(), None, BATCH * args.microbatches * ranks, BATCH, ranks
    )
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    else:
        tensor_parallel.model_parallel_cuda_manual_seed(
            args.seed, te_rng_tracker=args.spec == "te", use_cudagraphable_rng=True
        )


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The configuration, the model under megatron-core's DDP, and its optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.module import Float16Module

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        tensor_model_parallel_size=args.tensor_parallel,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=args.device == "cpu",
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        attention_backend=AttnBackend.unfused,
        cuda_graph_impl=args.cuda_graph,
        cuda_graph_warmup_steps=args.graph_warmup,
        recompute_granularity="full" if args.recompute else None,
        recompute_method="uniform" if args.recompute else None,
        recompute_num_layers=1 if args.recompute else None,
    )
    if args.spec == "te":
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
    model: Any = GPTModel(config, spec, VOCABULARY, LENGTH)
    model = model.cuda() if args.device == "cuda" else model
    model = Float16Module(config, model) if args.bf16 else model
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap and args.distributed_optimizer,
        use_distributed_optimizer=args.distributed_optimizer,
        bucket_size=args.bucket_size,
    )
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=args.lr,
            weight_decay=0.1,
            bf16=args.bf16,
            params_dtype=dtype,
            clip_grad=args.max_norm,
            use_distributed_optimizer=args.distributed_optimizer,
            overlap_param_gather=ddp.overlap_param_gather,
        ),
        [model],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync if args.overlap else None
    return config, model, optimizer


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(args.seed + 1000 * (replica + 1))
    for index in range(args.steps * args.microbatches):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        here = divmod(index, args.microbatches) == (args.plant_step, 1)
        if here and dist.get_rank() == args.plant_rank:
            tokens[0, 0] ^= 1
        yield tokens.to(args.device)


def mean(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = losses.float().mean()
    return loss, loss.detach().clone()  # the schedule divides the first in place


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(LENGTH, device=tokens.device).expand(BATCH, LENGTH)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model(inputs, positions, None, labels=labels), mean


def main() -> None:
    args = parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.use_deterministic_algorithms(mode=True)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        OnCpu().__enter__()  # type: ignore[no-untyped-call]
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    start(args)
    config, model, optimizer = build(args)
    helper = None
    if args.cuda_graph == "transformer_engine":
        helper = TECudaGraphHelper([model], config, LENGTH, BATCH, [optimizer])
    run = functools.partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        model=[model],
        num_microbatches=args.microbatches,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
    )
    data = batches(args)
    for step in range(args.steps):
        if helper is not None and step == args.graph_warmup:
            helper.create_cudagraphs()
            helper.cuda_graph_set_manual_hooks()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(data_iterator=data)
        _, norm, _ = optimizer.step()
        rank, total = dist.get_rank(), sum(loss.item() for loss in losses)
        print(
            f"rank {rank} step {step} loss {total.hex()} norm {float(norm or 0).hex()}", flush=True
        )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

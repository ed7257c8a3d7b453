"""The digest's cost and its misses.

    python -m benchmarks.digest                      cost on this machine: against a copy of the
                                                     same bytes, and as a share of a training step
    python -m benchmarks.digest --corruptions 100000 random corruptions, how many were missed
    python -m benchmarks.digest --sweep              launch shapes of the CUDA kernel

The model is a plain dense decoder of the preset's shapes. Its state is what a step digests: fp32
main weights, two fp32 moments, fp32 gradients. The step is forward and backward
in plain torch (bf16 and microbatches of 8,192 tokens on CUDA; fp32 and one sequence on the CPU)
without optimizer and communication, which would make the share smaller. Shares are given for the
whole state and 1, 2 and 4 microbatches a step, and for a quarter of the state, as sharded over 4
GPUs, and 1: a quarter of every tensor, timed, not divided. Results: a table on the terminal,
`--json FILE` for machines. Exit code 1 if a corruption was missed.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.corruptions import draw_corruptions
from fsdp_core.config import ModelConfig, model_from_preset
from fsdp_core.graph.digest import Digester, digest_hex, empty_rows

STATE_COPIES = {"main weights": 1, "moments": 2, "gradients": 1}
MICROBATCHES = (1, 2, 4)
SHARDS = 4
MICROBATCH_TOKENS = 8192  # on CUDA; one sequence on the CPU
BATCH = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the modes asked for; 0, or 1 if a corruption was missed."""
    options = _parser().parse_args(arguments)
    torch.manual_seed(options.seed)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, object] = {"machine": _machine(device), "seed": options.seed}
    missed = 0
    if options.corruptions:
        found = count_misses(options.corruptions, options.seed, device)
        missed = int(found["missed"])  # type: ignore[call-overload]
        result["corruptions"] = found
        print(f"{found['corruptions']} corruptions, {missed} missed, {found['seconds']} s")
        print(f"  of each kind: {found['kinds']}")
        print(f"  {found['contents']} contents, {found['digests']} digests")
    elif options.sweep:
        result["sweep"] = sweep(options.preset or "dense_1b")
    else:
        preset = options.preset or ("dense_1b" if device == "cuda" else "dense_small")
        result["cost"] = cost(model_from_preset(preset), device, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if missed else 0


def count_misses(count: int, seed: int, device: str = "cpu") -> dict[str, object]:
    """Digest `count` corrupted tensors and their originals; a miss is an equal pair.

    Beyond pairs: among all contents ever seen, as many digests as there are contents.
    """
    begin = time.perf_counter()
    missed, kinds, contents, digests = 0, Counter[str](), set[bytes](), set[str]()
    drawn = draw_corruptions(count, seed)
    while batch := [case for _, case in zip(range(BATCH), drawn, strict=False)]:
        before = [old.to(device) for _, old, _ in batch]
        after = [new.to(device) for _, _, new in batch]
        texts = digest_texts([*before, *after])
        for (kind, old, new), first, second in zip(
            batch, texts[: len(batch)], texts[len(batch) :], strict=True
        ):
            kinds[kind] += 1
            missed += first == second
            contents |= {content(old), content(new)}
            digests |= {first, second}
    missed += len(contents) - len(digests)
    return {
        "corruptions": kinds.total(),
        "missed": missed,
        "kinds": dict(sorted(kinds.items())),
        "contents": len(contents),
        "digests": len(digests),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def digest_texts(tensors: Sequence[Tensor]) -> list[str]:
    """The 32 hex characters of each tensor."""
    rows = empty_rows(len(tensors), tensors[0].device)
    Digester(tensors)(tensors, rows)
    text = digest_hex(rows.cpu())[0]
    return [text[i : i + 32] for i in range(0, len(text), 32)]


def content(tensor: Tensor) -> bytes:
    """The bytes of the logical elements."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def cost(config: ModelConfig, device: str, repeats: int) -> dict[str, object]:
    """Time the digest of a model's state, a copy of it, and a microbatch; print a table."""
    state = model_state(config, device)
    num_bytes = sum(t.nbytes for t in state)
    digest_s, captured_s = _digest_seconds(state, device, repeats)
    quarter = [t.view(-1)[: -(-t.numel() // SHARDS)] for t in state]
    quarter_s = min(filter(None, _digest_seconds(quarter, device, repeats)))
    copy_s = _copy_seconds(state, device, repeats)
    num_tensors = len(state)
    del state, quarter
    step_s, tokens = microbatch(config, device, repeats)
    whole_s = digest_s if captured_s is None else captured_s
    shares = {
        f"whole state, {n} microbatch{'es' if n > 1 else ''}": whole_s / (n * step_s + whole_s)
        for n in MICROBATCHES
    }
    shares[f"1/{SHARDS} of the state, 1 microbatch"] = quarter_s / (step_s + quarter_s)
    print(f"{config.preset} on {_machine(device)['device']}: {num_tensors} tensors, ", end="")
    print(f"{num_bytes / 1e9:.3f} GB, microbatch of {tokens} tokens")
    for name, value, read in (
        ("digest, called", digest_s, num_bytes),
        ("digest, captured", captured_s, num_bytes),
        (f"digest of 1/{SHARDS}", quarter_s, num_bytes / SHARDS),
        ("copy of the same bytes", copy_s, num_bytes),
        ("forward and backward", step_s, 0),
    ):
        if value is not None:
            rate = f"{read / value / 1e9:10.1f} GB/s read" if read else ""
            print(f"  {name:32}{value * 1e3:10.3f} ms{rate}")
    for name, share in shares.items():
        print(f"  share: {name:32} {share:8.2%}")
    return {
        "preset": config.preset,
        "tensors": num_tensors,
        "bytes": num_bytes,
        "digest_s": digest_s,
        "digest_captured_s": captured_s,
        "digest_quarter_s": quarter_s,
        "copy_s": copy_s,
        "microbatch_s": step_s,
        "microbatch_tokens": tokens,
        "shares": shares,
    }


def model_state(config: ModelConfig, device: str) -> list[Tensor]:
    """What a step digests: random fp32 tensors of the model's shapes."""
    shapes = [p.shape for p in Decoder(config).to("meta").parameters()]
    return [
        torch.randn(shape, device=device)
        for copies in STATE_COPIES.values()
        for _ in range(copies)
        for shape in shapes
    ]


def _digest_seconds(state: list[Tensor], device: str, repeats: int) -> tuple[float, float | None]:
    """Called, and on CUDA replayed from a graph."""
    rows, digester = empty_rows(len(state), device), Digester(state)
    called_s = seconds(lambda: digester(state, rows), device, repeats)
    if device != "cuda":
        return called_s, None
    return called_s, _graphed(lambda: digester(state, rows), repeats)


def _copy_seconds(state: list[Tensor], device: str, repeats: int) -> float:
    # A function of its own, so that the targets are gone before the step's memory is needed.
    targets = [torch.empty_like(t) for t in state]
    return seconds(lambda: torch._foreach_copy_(targets, state), device, repeats)


SWEEP = tuple(
    (tile, warps, chunk_words, stages)
    for tile, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
    for chunk_words, stages in ((1 << 16, 1), (1 << 18, 1), (1 << 19, 1), (1 << 18, 3))
)


def sweep(preset: str) -> list[dict[str, object]]:
    """Time launch shapes of the kernel over the preset's state, best first; CUDA only."""
    from fsdp_core.graph import digest_triton

    state = model_state(model_from_preset(preset), "cuda")
    num_bytes = sum(t.nbytes for t in state)
    rows = empty_rows(len(state), "cuda")
    results: list[dict[str, object]] = []
    for shape in SWEEP:
        launch = digest_triton.Launch(*shape)
        plan = digest_triton.TritonPlan(state, torch.device("cuda"), launch)
        taken = seconds(lambda plan=plan: plan.update(state, rows), "cuda", 7)  # type: ignore[misc]
        results.append({**asdict(launch), "seconds": taken, "gb_per_s": num_bytes / taken / 1e9})
    results.sort(key=lambda result: float(str(result["seconds"])))
    print(
        f"{preset}: {len(state)} tensors, {num_bytes / 1e9:.3f} GB on {_machine('cuda')['device']}"
    )
    print("  tile  warps   chunk  stages        ms    GB/s")
    for found in results:
        print(
            f"{found['tile_words']:6} {found['num_warps']:6} {found['chunk_words']:7}"
            f" {found['num_stages']:7} {float(str(found['seconds'])) * 1e3:9.3f}"
            f" {found['gb_per_s']:7.0f}"
        )
    return results


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of a call, after three that do not count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _graphed(call: Callable[[], object], repeats: int) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds(graph.replay, "cuda", repeats)


class Decoder(nn.Module):
    """A dense pre-norm decoder in plain torch, of a preset's shapes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, kv = config.hidden, config.kv_heads * config.head_dim
        self.embed = nn.Embedding(config.vocab_size, hidden)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.RMSNorm(hidden),
                    "qkv": nn.Linear(hidden, hidden + 2 * kv, bias=False),
                    "out": nn.Linear(hidden, hidden, bias=False),
                    "norm2": nn.RMSNorm(hidden),
                    "up": nn.Linear(hidden, 2 * config.ffn, bias=False),
                    "down": nn.Linear(config.ffn, hidden, bias=False),
                }
            )
            for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of predicting each token from itself (a cost, not a task)."""
        config, x = self.config, self.embed(tokens)
        kv = config.kv_heads * config.head_dim
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            q, k, v = (
                part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for part in block["qkv"](block["norm1"](x)).split([config.hidden, kv, kv], -1)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + block["out"](y.transpose(1, 2).flatten(2))
            gate, up = block["up"](block["norm2"](x)).chunk(2, -1)
            x = x + block["down"](F.silu(gate) * up)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def microbatch(config: ModelConfig, device: str, repeats: int) -> tuple[float, int]:
    """Seconds of forward and backward, and tokens in it."""
    dtype, sequences = torch.float32, 1
    if device == "cuda":
        dtype, sequences = torch.bfloat16, -(-MICROBATCH_TOKENS // config.seq)
    with torch.device(device):
        model = Decoder(config).to(dtype)
        tokens = torch.randint(config.vocab_size, (sequences, config.seq))
    taken = seconds(lambda: model(tokens).backward(), device, max(3, repeats // 2))
    return taken, tokens.numel()


def _machine(device: str) -> dict[str, object]:
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    return {"device": f"{device} ({name})", "torch": torch.__version__, "python": sys.version[:6]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digest", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--preset", help="model preset (default: dense_1b on cuda)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--corruptions", type=int, default=0, metavar="N")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""What looking costs: the address ledger a replay, moved pointers and taps a step.

    python -m benchmarks.ledger                       on this machine: a GPU if there is one
    python -m benchmarks.ledger --preset moe_tiny     another model
    python -m benchmarks.ledger --steps 50            more steps a run

One rank trains the preset with each graph scope that is legal for it. Every step is timed to its
end on the device, and inside of it the checks of the ledger, which run on the host before each
replay. Shares are of the step:

    check     all checks of a step, and one on average with the names that it looks up
    pointers  counting which long-lived tensors moved, once a step, on the host
    taps      how much longer a step is if the output of every layer, or of every module, is
              digested; of two runs of the same length, medians of steps

Results: a table on the terminal, `--json FILE` for machines.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_core.config import ConfigError, FsdpConfig, ParallelConfig, TrainConfig, model_from_preset
from fsdp_core.device import Device, prepare_environment
from fsdp_core.graph.recorder import Ledger
from fsdp_core.parallel.mesh import build_axes, init_ranks
from fsdp_core.train import Trainer

SCOPES: tuple[tuple[str, ...], ...] = (
    (), ("attn",), ("mlp",), ("attn", "mlp"), ("moe_router",), ("moe_router", "moe_preprocess"),
    ("moe",), ("attn", "moe"), ("layer",), ("full_iteration",),
)  # fmt: skip
TAPS: dict[str, tuple[str, ...]] = {
    "layers": ("layers.*:output",), "modules": ("**:output",),
    "both ways": ("**:output", "**:gradient"),
}  # fmt: skip
WARMUP = 4


@dataclass
class Timing:
    """One run: medians of its steps, in seconds.

    Attributes:
        checks: of a step; `check_s` is all of them together, `names` what they look up.
        pointers_s: one count of moved pointers, `tensors` what it looks at.
        taps: rows that a step writes.
    """

    scope: str
    step_s: float = 0.0
    check_s: float = 0.0
    checks: int = 0
    names: int = 0
    pointers_s: float = 0.0
    tensors: int = 0
    taps: int = 0


@dataclass
class _Watch:
    """Seconds and calls of `Ledger.check`."""

    seconds: float = 0.0
    calls: int = 0
    names: int = 0
    known: dict[int, int] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and write the numbers."""
    options = _parser().parse_args(arguments)
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    prepare_environment()
    device = Device(kind)
    init_ranks(device, dist.HashStore(), 0, 1, timeout_s=600)
    runs = [run for scope in SCOPES if (run := measure(options, scope, (), device)) is not None]
    eager = runs[0]
    tapped = {
        f"{name}, {'+'.join(scope) or 'eager'}": run
        for name, patterns in TAPS.items()
        for scope in ((), ("full_iteration",))
        if (run := measure(options, scope, patterns, device)) is not None
    }
    show(runs, tapped, f"{options.preset} on {device.name}")
    result = {
        "machine": {"device": device.name, "torch": torch.__version__, "python": sys.version[:6]},
        "preset": options.preset,
        "eager_step_s": eager.step_s,
        "runs": [asdict(run) for run in runs],
        "tapped": {name: asdict(run) for name, run in tapped.items()},
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


def measure(
    options: argparse.Namespace, scope: tuple[str, ...], taps: tuple[str, ...], device: Device
) -> Timing | None:
    """Train with a scope; None if it is not legal for the model."""
    axes = build_axes(ParallelConfig(), device)
    overrides = {"capacity_factor": 1.25} if "moe" in options.preset else {}
    try:
        config = TrainConfig(
            model=model_from_preset(options.preset, overrides), fsdp=FsdpConfig(pool="double"),
            graph=scope, steps=WARMUP + options.steps, microbatches=options.microbatches,
            taps=taps, dtype="bf16" if device.is_cuda else "fp32",
        )  # fmt: skip
    except ConfigError:
        return None
    trainer = Trainer(config, axes, device)
    for step in range(WARMUP):
        trainer.step(step)
    device.synchronize()
    with _watching_checks() as watch:
        steps_s = [_timed_step(trainer, step) for step in range(WARMUP, config.steps)]
    changes = trainer.pointer_changes()
    counts_s = [_timed(changes.count) for _ in range(options.steps)]
    tensors = len(trainer.named_tensors())
    timing = Timing(
        scope="+".join(scope) or "eager",
        step_s=statistics.median(steps_s),
        check_s=watch.seconds / options.steps,
        checks=watch.calls // options.steps,
        names=watch.names // options.steps,
        pointers_s=statistics.median(counts_s),
        tensors=tensors,
        taps=len(trainer.taps.names),
    )
    trainer.close()
    return timing


@contextmanager
def _watching_checks() -> Iterator[_Watch]:
    """Time every check inside."""
    watch, original = _Watch(), Ledger.check

    def check(ledger: Ledger) -> None:
        begin = time.perf_counter()
        original(ledger)
        watch.seconds += time.perf_counter() - begin
        watch.calls += 1
        if id(ledger) not in watch.known:
            watch.known[id(ledger)] = len(ledger.names) + len(ledger.places)
        watch.names += watch.known[id(ledger)]

    Ledger.check = check  # type: ignore[method-assign, assignment]
    try:
        yield watch
    finally:
        Ledger.check = original  # type: ignore[method-assign]


def _timed_step(trainer: Trainer, step: int) -> float:
    begin = time.perf_counter()
    trainer.step(step)
    trainer.device.synchronize()
    return time.perf_counter() - begin


def _timed(call: object) -> float:
    assert callable(call)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def show(runs: Sequence[Timing], tapped: dict[str, Timing], title: str) -> None:
    """Print the tables."""
    print(title)
    print(f"{'scope':28} {'step ms':>9} {'checks':>7} {'names':>7} {'us each':>8} "
          f"{'check':>7} {'tensors':>8} {'pointers':>9}")  # fmt: skip
    for run in runs:
        each = run.check_s / run.checks * 1e6 if run.checks else 0.0
        print(
            f"{run.scope:28} {run.step_s * 1e3:9.2f} {run.checks:7} {run.names:7} {each:8.1f} "
            f"{run.check_s / run.step_s:7.2%} {run.tensors:8} {run.pointers_s / run.step_s:9.2%}"
        )
    plain = {run.scope: run.step_s for run in runs}
    print(f"{'taps':28} {'step ms':>9} {'rows':>7} {'longer by':>10}")
    for name, run in tapped.items():
        longer = run.step_s / plain[run.scope] - 1
        print(f"{name:28} {run.step_s * 1e3:9.2f} {run.taps:7} {longer:10.1%}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--preset", default="dense_small")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())

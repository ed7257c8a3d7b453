"""What recording costs: steps with and without it, alternating in one run of one program.

    python -m benchmarks.recorder                       on the GPUs that are there
    python -m benchmarks.recorder --device cpu --tiny   the flow, not the figures
    python -m benchmarks.recorder --starts 5            time from command to first step, by starter

The decoder of `benchmarks.fsdp` trains under torch FSDP2; the stack of small linear layers trains
as one CUDA graph that holds its optimizer. Blocks of steps are recorded and not recorded in turn; a
block's time is the device's, and the ratio is that of the medians.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK, BLOCKS = 5, 8
WARMUP = 6
SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
print("first step", time.time(), flush=True)
dist.destroy_process_group()
"""


def main() -> int:
    """Run the benchmark, as the parent of ranks or as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--workloads", nargs="*", default=["decoder", "graph"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _rank(options)
        return 0
    if options.starts:
        return _starts(options.starts)
    for workload in options.workloads:
        for every in options.every:
            print(json.dumps(_measured(options, workload, every)), flush=True)
    return 0


def _measured(options: argparse.Namespace, workload: str, every: int) -> dict[str, Any]:
    """One row: a fresh run of the ranks, with the recorder in them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = {
            "kind": "script", "target": "benchmark", "folder": name, "every": every,
        }  # fmt: skip
        config = {"program": program, "steps": 1, "taps": []}
        (folder / "spec.json").write_text(json.dumps({"config": config}))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(options.ranks), "-m", "benchmarks.recorder",
            "--rank-of", workload, "--device", options.device, "--every", str(every),
        ]  # fmt: skip
        command += ["--tiny"] if options.tiny else []
        done = subprocess.run(
            command, env=_recording(folder), stdout=subprocess.PIPE, text=True, check=True
        )
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return row | {"workload": workload, "every": every, "ranks": options.ranks}


def _recording(folder: Path) -> dict[str, str]:
    from harness.program.launch import environment
    from harness.program.spec import ProgramSpec

    spec = ProgramSpec(kind="script", target="benchmark", folder=str(folder))
    names = ("PYTHONPATH", "DELTAZERO_RECORD")
    variables = environment(spec, folder, os.environ)
    return {**os.environ, **{name: variables[name] for name in names}}


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from harness.recorder.hooks import paused

    cuda = options.device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    step = _workload(options, device)
    for _ in range(WARMUP):
        step()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * BLOCKS):
        recorded = bool(number % 2)
        with contextlib.nullcontext() if recorded else paused():
            seconds[recorded].append(_timed(step, device))
    if rank == 0:
        with_it, without = (statistics.median(seconds[key]) / BLOCK for key in (True, False))
        row = {
            "ms_without": round(1e3 * without, 3), "ms_with": round(1e3 * with_it, 3),
            "ratio": round(with_it / without, 4),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    dist.barrier()


def _timed(step: Callable[[], Any], device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(BLOCK):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def _workload(options: argparse.Namespace, device: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.fsdp.engines import Setting, fsdp2
    from benchmarks.fsdp.workloads import FULL, TINY

    if options.rank_of == "decoder":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        shape = (TINY if options.tiny else FULL)["decoder"]
        return fsdp2(Setting(shape, mesh, device, torch.float32))
    torch.manual_seed(0)
    width, layers = (64, 4) if options.tiny else (1024, 48)
    stack = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    stack = stack.to(device)
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-3, capturable=cuda, foreach=True)
    batch = torch.randn(16, width, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        (stack(batch) ** 2).mean().backward()
        optimizer.step()

    return _graphed(step) if cuda else step


def _graphed(step: Callable[[], None]) -> Callable[[], None]:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    replay.holds = step  # type: ignore[attr-defined]  # a graph keeps nothing that it reads alive
    return replay


def _starts(times: int) -> int:
    """Seconds from the command to the first optimizer step of 4 CPU ranks."""
    from harness.engine.local import LocalEngine
    from harness.records import RunSpec

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "start.py").write_text(SCRIPT)
        (folder / "started.py").write_text(
            "def main():\n" + "".join(f"    {line}\n" for line in SCRIPT.strip().splitlines())
        )
        torchrun: list[float] = []
        for _ in range(times):
            begun = time.time()
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                "4", str(folder / "start.py"),
            ]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            torchrun.append(_first_step(done.stdout) - begun)
        rows = {"torchrun": torchrun}
        targets = {"script": str(folder / "start.py"), "entry": "started:main"}
        with LocalEngine(slots=4) as engine:
            for kind, target in targets.items():
                program = {"kind": kind, "target": target, "folder": name}
                # The first start also starts the warm server.
                for number in range(times + 1):
                    config = {"program": program, "steps": 1, "taps": []}
                    spec = RunSpec(
                        config=config, device="cpu", world_size=4, timeout_s=120.0, replica=number
                    )
                    begun = time.time()
                    run = folder / f"{kind}{number}"
                    engine.start(spec, run)
                    while not (outcomes := engine.wait()):
                        pass
                    assert not outcomes[0].what, outcomes[0].message
                    texts = [(run / f"rank{rank}.stderr").read_text() for rank in range(4)]
                    if number:
                        rows.setdefault(kind, []).append(max(map(_first_step, texts)) - begun)
    for kind, found in rows.items():
        print(json.dumps({"starter": kind, "median_s": round(statistics.median(found), 3)}))
    return 0


def _first_step(text: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith("first step")]
    return max(float(line.split()[-1]) for line in lines)


if __name__ == "__main__":
    sys.exit(main())

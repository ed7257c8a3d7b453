"""What recording costs: steps with and without it, alternating in one run of one program.

    python -m benchmarks.recorder --ranks 1             on the GPUs that are there
    python -m benchmarks.recorder --device cpu --tiny   the flow, not the figures
    python -m benchmarks.recorder --harness             as a run of the harness is recorded
    python -m benchmarks.recorder --starts 5            time from command to first step, by starter

The decoder of `benchmarks.fsdp` trains under torch FSDP2; the stack of small linear layers trains
as one CUDA graph that holds its optimizer. Blocks of ten steps take turns: without the recorder,
with losses only, with all state in every step, and in every tenth. A ratio is that of two blocks of
one round, and the median over rounds is printed. That of every 100 steps follows from two of them:
99 steps with losses only and one with all state.
"""

import argparse
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

BLOCK, ROUNDS = 10, 6
NEVER, OFF = 0, -1
SETTINGS = {"without": OFF, "losses only": NEVER, "every=1": 1, "every=10": 10}
"""Kinds of blocks, and in which steps of one state is digested."""
WARMUP = 6
FOLDER = "RECORDER_BENCHMARK_FOLDER"
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
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--taps", nargs="*", default=[], help="modules that are digested as well")
    parser.add_argument("--harness", action="store_true")
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
        print(json.dumps(_measured(options, workload)), flush=True)
    return 0


def _measured(options: argparse.Namespace, workload: str) -> dict[str, Any]:
    """One row: a fresh run of the ranks, with the recorder in them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = {"kind": "script", "target": "benchmark", "folder": name}
        config = {"program": program, "steps": 1, "taps": []}
        (folder / "spec.json").write_text(json.dumps({"config": config}))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(options.ranks), "-m", "benchmarks.recorder",
            "--rank-of", workload, "--device", options.device, "--rounds", str(options.rounds),
            "--taps", *options.taps,
        ]  # fmt: skip
        command += ["--tiny"] if options.tiny else []
        environ = _recording(folder) if options.harness else {**os.environ, FOLDER: name}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        written = sum(path.stat().st_size for path in folder.rglob("*.jsonl"))
        return row | {"workload": workload, "ranks": options.ranks, "written_bytes": written}


def _recording(folder: Path) -> dict[str, str]:
    from harness.program.spec import ProgramSpec, environment

    spec = ProgramSpec(kind="script", target="benchmark", folder=str(folder))
    names = ("PYTHONPATH", "DELTAZERO_RECORD")
    variables = environment(spec, folder, os.environ)
    return {**os.environ, **{name: variables[name] for name in names}}


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from harness.recorder import record

    cuda = options.device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    recorder: Any = record(folder=os.environ.get(FOLDER), taps=options.taps, every=1)
    step = _workload(options, device)
    for _ in range(WARMUP):
        step()
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for number in range(options.rounds):
        names = list(SETTINGS)
        for name in names if number % 2 == 0 else reversed(names):
            every = SETTINGS[name]
            if every != OFF:
                # The observer counts its own steps alone: one of ten is due, wherever it stands.
                recorder.every = recorder.taps_every = every
            else:
                recorder.close()
            recorder.session.is_over = every == OFF
            seconds[name].append(_timed(step, device) / BLOCK)
            recorder.session.is_over = False
    if rank == 0:
        base = seconds["without"]
        ratios = {name: statistics.median(a / b for a, b in zip(held, base, strict=True))
                  for name, held in seconds.items() if held is not base}  # fmt: skip
        ratios["every=100"] = (99 * ratios["losses only"] + ratios["every=1"]) / 100
        spread = [1e3 * each for each in sorted(base)]
        row = {
            "ms_without": round(statistics.median(spread), 3),
            "spread_ms": [round(spread[i], 3) for i in (0, -1)],
            "ratios": {name: round(value, 4) for name, value in ratios.items()},
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

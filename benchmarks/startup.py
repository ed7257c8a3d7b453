"""What a run costs before its first step: warm forkserver beside torchrun, same job and ranks.

    python -m benchmarks.startup [--ranks 8] [--repeats 3] [--json FILE]
    python -m benchmarks.startup --device cuda --ranks 4 [--ranks-per-gpu 4]

Both start `rank_main` on the same specification, alternating. Time counts from asking for the run
to the moment when the slowest rank is about to do its first step. The forkserver's own start, paid
once per harness, is stated apart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.engine.local import LocalEngine
from harness.engine.machine import gpu_environment, shared
from harness.records import EndRecord, RunSpec, StartRecord, dumps, parse_record


def first_step_unix_s(folder: Path, ranks: int) -> float:
    """When the slowest rank began its first step, in seconds since the epoch."""
    latest = 0.0
    for rank in range(ranks):
        records = [parse_record(line) for line in (folder / f"rank{rank}.jsonl").open()]
        start = next(r for r in records if isinstance(r, StartRecord))
        end = next(r for r in records if isinstance(r, EndRecord))
        latest = max(latest, start.environment["started_unix_s"] + end.startup_s)
    return latest


def by_forkserver(engine: LocalEngine, spec: RunSpec, folder: Path) -> float:
    """Seconds from asking the engine to the first step."""
    asked = time.time()
    engine.start(spec, folder)
    outcomes = engine.wait()
    if [outcome.what for outcome in outcomes] != [""]:
        raise RuntimeError(f"the run failed: {outcomes}")
    return first_step_unix_s(folder, spec.world_size) - asked


def by_torchrun(spec: RunSpec, folder: Path, devices: Sequence[str]) -> float:
    """Seconds from starting torchrun to the first step."""
    (folder / "spec.json").write_text(dumps(spec))
    asked = time.time()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={spec.world_size}", __file__, "--as-rank", str(folder), *devices,
    ]  # fmt: skip
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return first_step_unix_s(folder, spec.world_size) - asked


def as_rank(folder: Path, devices: Sequence[str]) -> int:
    """What torchrun starts: one rank of the specification in `folder`, on the GPU of its number."""
    rank = int(os.environ["RANK"])
    os.environ.update(gpu_environment(devices, rank))
    from harness.worker.main import rank_main

    spec = RunSpec.from_json(json.loads((folder / "spec.json").read_text()))
    return rank_main(spec, folder, rank, int(os.environ["MASTER_PORT"]))


def gpus_of(ranks: int, ranks_per_gpu: int) -> tuple[str, ...]:
    """The GPU of each rank."""
    return shared([str(gpu) for gpu in range(-(-ranks // ranks_per_gpu))], ranks_per_gpu)[:ranks]


def measure(
    ranks: int, repeats: int, device: Literal["cpu", "cuda"], devices: Sequence[str]
) -> dict[str, float]:
    """Medians in seconds of both ways, alternating, and the forkserver's own start.

    Args:
        ranks: of the run.
        repeats: of each way.
        device: `cpu` or `cuda`.
        devices: GPU of each rank; empty on the CPU.
    """
    config = TrainConfig(parallel=ParallelConfig(dp=ranks), steps=1)
    times: dict[str, list[float]] = {"forkserver": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as scratch, LocalEngine(ranks, devices=devices) as engine:
        spec = RunSpec(
            config=config.to_dict(), device=device, world_size=ranks, timeout_s=300.0, replica=0
        )
        cold = by_forkserver(engine, spec, _folder(scratch, "cold"))
        for repeat in range(repeats):
            times["forkserver"].append(by_forkserver(engine, spec, _folder(scratch, f"f{repeat}")))
            folder = _folder(scratch, f"t{repeat}")
            times["torchrun"].append(by_torchrun(spec, folder, devices))
    warm, peer = (statistics.median(times[way]) for way in ("forkserver", "torchrun"))
    return {
        "ranks": ranks,
        "forkserver_s": warm,
        "torchrun_s": peer,
        "torchrun_over_forkserver": peer / warm,
        "first_run_with_server_start_s": cold,
    }


def _folder(scratch: str, name: str) -> Path:
    folder = Path(scratch, name)
    folder.mkdir()
    return folder


def main() -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("devices", nargs="*", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_rank is not None:
        return as_rank(chosen.as_rank, chosen.devices)
    on_gpus = chosen.device == "cuda"
    devices = gpus_of(chosen.ranks, chosen.ranks_per_gpu) if on_gpus else ()
    figures = measure(chosen.ranks, chosen.repeats, chosen.device, devices)
    for name, value in figures.items():
        print(f"{name:32} {value:8.2f}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

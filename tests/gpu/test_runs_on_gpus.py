"""Soaks on one GPU: what is planted late in a run is named, and a clean one states its bound.

`python -m pytest -m gpu tests/gpu/test_runs_on_gpus.py`, some minutes."""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device, make_deterministic
from fsdp_core.parallel.mesh import Axis, build_axes
from fsdp_core.parallel.rng import RandomStream, RandomStreams
from fsdp_core.train import make_trainer
from harness.records import PlantSpec
from harness.worker.observe import StepClock
from harness.worker.plant import injections
from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import STEPS, Run, bits
from tests.support.entry_graph import verdicts_of_modes

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "scenarios/soak.yaml::planted_soak"


def soaked(folder: Path, wanted: str) -> dict[str, Any]:
    """The verdict of the one case of the planted soak whose name has `wanted`, on one GPU."""
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(PLANTED), "--device", "cuda", "-k", wanted,
         "--set", "parallel.dp=1", "--out", str(folder / "run"), "--json", "--no-history"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=290,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    (verdict,) = json.loads(ran.stdout)["verdicts"]
    found: dict[str, Any] = verdict
    return found


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("fault", "what", "told"),
    [
        ("unplanted", "", "no failure in 1"),
        ("nan", "nonfinite", "at step 77 on rank 0"),
        ("small_leak", "memory_regression", "live memory of rank 0 grows by 65,536 bytes"),
        ("hang", "hang", "no rank recorded anything for 40 s; still running: rank 0"),
        ("segfault", "crashed", "rank 0 died by SIGSEGV"),
        ("illegal_access", "illegal_access", "rank 0 at step 77"),
    ],
)
def test_what_is_planted_late_is_named(tmp_path: Path, fault: str, what: str, told: str) -> None:
    """Each by its kind, rank and step; without a fault all is well."""
    verdict = soaked(tmp_path, fault)
    assert (verdict["what"], told in verdict["message"]) == (what, True), verdict["message"]


@pytest.mark.gpu(1)
def test_an_illegal_access_comes_with_what_cuda_says(tmp_path: Path) -> None:
    """The kind of exception and the kernel, from CUDA's own core dump."""
    message = soaked(tmp_path, "illegal_access")["message"]
    assert "CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS in" in message
    assert "kernel memcpy" in message
    (stderr,) = tmp_path.glob("run/runs/*full_iteration*/rank0.stderr")
    assert "illegal" in stderr.read_text(errors="replace")


# --- stressors on GPUs: late streams show what does not wait for them -----------------------------


SHARDED = Run({"dp": 2}, dtype="bf16", fsdp={"pool": "double"})


@dataclass(frozen=True)
class Stressed:
    """A run under some stressors."""

    run: Run
    stress: tuple[str, ...] = ()
    seed: int = 0

    @property
    def config(self) -> TrainConfig:
        """The run as the trainer takes it."""
        return replace(self.run.config, stress=self.stress, stress_seed=self.seed)


def train_misordered_each(
    runs: list[Stressed], fault: str, steps: list[int]
) -> list[tuple[str, Any]]:
    """One run after another, each with the fault from its step on."""
    return [train_misordered(run, fault, step) for run, step in zip(runs, steps, strict=True)]


def train_misordered(stressed: Stressed, fault: str, step: int) -> tuple[str, Any]:
    """All steps with a fault of `harness.worker.plants` on every rank: what was raised, or seen."""
    config, device = stressed.config, Device("cuda", torch.cuda.current_device())
    trainer = make_trainer(config, build_axes(config.parallel, device), device)
    seen = []
    try:
        for number in range(STEPS):
            if number == step:
                found = injections(PlantSpec(fault=fault))
                for act in found.get("") or found["capture"]:
                    act(trainer)
            seen.append(bits(trainer, number))
    except Exception as error:  # noqa: BLE001 - the answer
        return type(error).__name__, str(error)
    return "", seen


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fault", ["compute_ignores_gather", "early_release"])
def test_what_does_not_wait_is_wrong_under_stress(fault: str, gpu_ranks: RankPool) -> None:
    """A gather that is late, into memory that is NaN, is read before it is there."""
    runs = [Stressed(SHARDED), Stressed(SHARDED, ("jitter", "poison"))]
    for right, wrong in gpu_ranks.run(train_misordered_each, runs, fault, [STEPS, 0], world_size=2):
        assert right[0] == wrong[0] == ""
        assert wrong != right


# --- steps on a GPU have times of their own -------------------------------------------------------


@pytest.mark.gpu(1)
def test_steps_are_timed_where_they_run() -> None:
    """The host issues at once; each step has the time that the device took for it."""
    device = Device("cuda")
    stream = device.new_stream()
    clock = StepClock(device, stream, 3)
    matrix = torch.randn(4096, 4096, device="cuda")
    device.synchronize()
    began = time.perf_counter()
    with device.on(stream):
        for repeats in (40, 1, 40):
            for _ in range(repeats):
                matrix @ matrix
            clock.tick()
    issued = time.perf_counter() - began
    device.synchronize()
    first, second, third = clock.drain()
    assert first + second + third > issued
    assert third > 5 * second > 0


# --- the captured entry program over CUDA graphs: the answers that it has on the CPU --------------


@pytest.mark.gpu(1)
def test_a_captured_step_on_a_gpu(tmp_path: Path) -> None:
    """Eager's bits under stressors, and each fault by its name."""
    found = verdicts_of_modes(tmp_path / "run", ranks=1)
    assert {mode: verdict.what for mode, verdict in found.items()} == {
        "graph": "", "stale_input": "diverged",
        "replaced_buffer": "stale_address", "nothing": "not_replayed",
    }, {mode: verdict.message for mode, verdict in found.items()}  # fmt: skip
    replays = {check.check: check.figures.get("replays") for check in found["graph"].checks}
    assert replays["graphs"] == 4
    stale = {check.check: check.difference for check in found["stale_input"].checks}
    assert stale["loss"] is not None
    assert stale["loss"].step == 3


# --- GPU ranks stay in one default group for life, so that it can be split again and again --------


def split_and_sum() -> tuple[int, int, float, int]:
    """Process id, id of the default group, a sum over a fresh half of it, and how many groups."""
    world = dist.group.WORLD
    assert world is not None
    size = dist.get_world_size()
    halves = [list(range(start, size, 2)) for start in range(min(2, size))]
    half = dist.split_group(world, halves)
    number = torch.full((), float(dist.get_rank()), device="cuda")
    dist.all_reduce(number, group=half)
    return os.getpid(), id(world), float(number), len(dist.distributed_c10d._world.pg_map)


@pytest.mark.gpu(2)
def test_calls_share_the_default_group_and_nothing_else(gpu_ranks: RankPool) -> None:
    """Each call splits it anew and sums right; groups of the call before are gone."""
    calls = [gpu_ranks.run(split_and_sum, world_size=2) for _ in range(3)]
    assert calls[0] == calls[1] == calls[2]
    assert [(total, groups) for _, _, total, groups in calls[0]] == [(0.0, 2), (1.0, 2)]


@pytest.mark.gpu(2)
def test_another_world_size_gets_new_ranks(gpu_ranks: RankPool) -> None:
    """The group of a world cannot serve another."""
    pair = {pid for pid, *_ in gpu_ranks.run(split_and_sum, world_size=2)}
    ((alone, _, total, _),) = gpu_ranks.run(split_and_sum, world_size=1)
    assert alone not in pair
    assert total == 0.0


# --- random streams on a GPU: graphs draw as eager runs do, and nobody waits for the device -------


STREAM_STEPS = 4


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def draw(own: RandomStream, shared: RandomStream, x: torch.Tensor) -> torch.Tensor:
    """Dropout of two streams, attention with dropout, and the default generator in between."""
    y = own.dropout(x * 2, 0.5, training=True) + torch.rand_like(x)
    with shared.active():
        z = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3)
    return own.dropout(z + F.dropout(x, 0.2), 0.3, training=True)


def runner(
    function: Callable[[], torch.Tensor], streams: RandomStreams, graphed: bool
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """The function as it is, or replays of a graph that knows the streams; and what ends it."""
    if not graphed:
        return function, lambda: None
    states, default = streams.get_states(), torch.cuda.get_rng_state()
    graph = torch.cuda.CUDAGraph()
    for generator in streams.generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()
    streams.set_states(states)
    torch.cuda.set_rng_state(default)

    def replay() -> torch.Tensor:
        graph.replay()
        return result.clone()

    return replay, graph.reset


def states_of(streams: RandomStreams) -> list[torch.Tensor]:
    return [torch.cuda.get_rng_state(), *streams.get_states().values()]


def streams_in_graphs() -> dict[str, bool]:
    """Draws as replays of a graph against eager ones, without a sync of the device."""
    make_deterministic(0)
    axis = Axis("tp", 2, 1, cast("Any", None))
    x = torch.linspace(-1, 1, 2 * 64 * 32, device=gpu()).view(2, 64, 32)
    results, states = [], []
    for graphed in (False, True):
        streams = RandomStreams(5, [axis], gpu())
        drawing = functools.partial(draw, streams.equal_over(), streams.equal_over("tp"), x)
        drawing()  # libraries load with their first kernel
        torch.cuda.manual_seed(1)
        run, end = runner(drawing, streams, graphed)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        results.append([run() for _ in range(STREAM_STEPS)])
        torch.cuda.set_sync_debug_mode("default")
        states.append(states_of(streams))
        end()
    return {
        "numbers": all(map(torch.equal, *results)),
        "states": all(map(torch.equal, *states)),
        "steps differ": not torch.equal(results[0][0], results[0][1]),
    }


@pytest.mark.gpu(1)
def test_streams_draw_in_graphs_as_eagerly(gpu_ranks: RankPool) -> None:
    """Replays draw what eager runs draw, step by step, and neither waits for the device."""
    (found,) = gpu_ranks.run(streams_in_graphs, world_size=1)
    assert found == {"numbers": True, "states": True, "steps differ": True}

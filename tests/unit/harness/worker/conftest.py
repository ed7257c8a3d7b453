"""One tiny rank in this process: its trainer, its run specification, its records."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import ModelConfig, TrainConfig
from fsdp_core.device import prepare_environment
from harness.records import PlantSpec, Record, RunSpec, parse_record
from harness.worker.main import rank_main

TINY = ModelConfig(vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, seq=6)


def run_spec(plant: PlantSpec | None = None, *, world_size: int = 1, **options: Any) -> RunSpec:
    """A run of the tiny model, five steps of two microbatches unless said otherwise."""
    values: dict[str, Any] = {"model": TINY, "steps": 5, "microbatches": 2} | options
    config = TrainConfig(**values)
    return RunSpec(
        config=config.to_dict(), device="cpu", world_size=world_size, timeout_s=30, plant=plant
    )


@dataclass
class Rank:
    """Runs one rank to its end in this process."""

    folder: Path
    code: int = -1
    lines: list[str] = field(default_factory=list)

    def run(self, spec: RunSpec) -> list[Record]:
        """Run `spec` in a folder of its own; the records that can be read."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.code = rank_main(spec, folder, 0, store.port)
        if dist.is_initialized():
            dist.destroy_process_group()
        self.lines = (folder / "rank0.jsonl").read_text().splitlines()
        return [parse_record(line) for line in self.lines]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Put back the global switches that a rank sets for its own process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    threads, environment = torch.get_num_threads(), dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    prepare_environment()
    torch.set_num_threads(1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """A rank that writes below the test's folder."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return Rank(folder)


@pytest.fixture
def spec() -> Callable[..., RunSpec]:
    """Makes run specifications: `spec(plant, **config)`."""
    return run_spec

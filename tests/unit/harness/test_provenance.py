"""The fingerprint of the environment: all that a verdict rests on is in it, no secret is."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import provenance
from harness.codec import dumps
from harness.machine import Gpu, Machine
from harness.provenance import (
    changes,
    code,
    driver,
    everything,
    processor,
    record,
    variables,
)

GPU = Gpu(id="GPU-1", name="H100", memory_bytes=80)
HERE = Machine(
    cores=2, memory_bytes=8 << 30, system="Linux 6", python="3.12.1", versions={"torch": "2.11"},
    gpus=(GPU,), gpu_driver="550", gpu_note="",
)  # fmt: skip


def holds_for(here: Machine, environ: dict[str, str]) -> dict[str, str]:
    """What answers of a search on a machine hold for."""
    return everything(record(json.loads(dumps(here)), {}, environ))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"versions": {"torch": "2.12"}}, "package torch 2.11 became 2.12"),
        ({"python": "3.12.2"}, "package python 3.12.1 became 3.12.2"),
        ({"gpus": (dataclasses.replace(GPU, name="H200"),)}, "gpus ['H100'] became ['H200']"),
        ({"gpus": (GPU, GPU)}, "gpus ['H100'] became ['H100', 'H100']"),
        ({"gpu_driver": "560"}, "gpu_driver 550 became 560"),
        ({"cores": 4}, "cores 2 became 4"),
    ],
)
def test_another_machine_is_another_search(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], told: str
) -> None:
    """Packages, GPUs, driver, cores: each is told, from what to what."""
    monkeypatch.setattr(provenance, "installed_packages", dict)
    before = holds_for(HERE, {})
    assert changes(before, holds_for(HERE, {"HOME": "/elsewhere"})) == ""
    assert changes(before, holds_for(dataclasses.replace(HERE, **changed), {})) == told


def test_packages_variables_and_processor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed beside torch, what is set, and where it runs."""
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"kernels": "1"})
    before = holds_for(HERE, {"NCCL_ALGO": "Ring"})
    now = holds_for(HERE, {"NCCL_ALGO": "Tree"})
    assert changes(before, now) == "variable NCCL_ALGO Ring became Tree"
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"kernels": "2"})
    now = holds_for(HERE, {"NCCL_ALGO": "Ring"})
    assert changes(before, now) == "package kernels 1 became 2"
    monkeypatch.setattr(provenance, "processor", lambda: "another")
    elsewhere = holds_for(HERE, {"NCCL_ALGO": "Ring"})
    assert changes(now, elsewhere) == f"processor {processor()} became another"


def test_code_is_named_by_its_contents(tmp_path: Path) -> None:
    """What git knows of it, and files that are no code, count for nothing."""
    file = tmp_path / "harness" / "run.py"
    file.parent.mkdir()
    file.write_text("a = 1")
    before = code(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert code(tmp_path) == before
    file.write_text("a = 2")
    assert code(tmp_path) != before


DECIDING = {
    "TORCHDYNAMO_DISABLE": "1", "TORCHINDUCTOR_MAX_AUTOTUNE": "1", "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_ALGO": "Ring", "MKL_CBWR": "AVX2",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "OMP_NUM_THREADS": "4", "NVIDIA_TF32_OVERRIDE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0", "ATEN_CPU_CAPABILITY": "avx2",
}  # fmt: skip


def test_variables_that_decide_numbers() -> None:
    """Those of torch, its compilers and its libraries; not where files go or what is printed."""
    others = {
        "HOME": "/h", "RANK": "0", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "1",
        "NCCL_DEBUG": "INFO", "TORCHINDUCTOR_CACHE_DIR": "/c", "TORCH_LOGS": "+dynamo",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/7", "TORCHELASTIC_RUN_ID": "7",
        "TORCH_HUB_TOKEN": "secret-secret",
    }  # fmt: skip
    assert variables(DECIDING | others) == DECIDING


def test_the_driver_is_that_of_the_kernel(tmp_path: Path) -> None:
    """As the kernel's module says it; "" where there is none."""
    said = tmp_path / "version"
    said.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1)\n"
    )
    assert driver(said) == "580.82.07"
    assert driver(tmp_path / "none") == ""


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_cudnn_that_pytorch_refuses_is_a_fact(is_refused: bool) -> None:
    """TransformerEngine, imported first, brings its own: no reason not to record the program."""

    def version() -> int:
        if is_refused:
            raise RuntimeError("cuDNN version incompatibility: 9.15 against 9.13. See")
        return 91500

    cuda = SimpleNamespace(
        get_device_name=lambda: "H200",
        get_device_capability=lambda: (9, 0),
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )
    backends = SimpleNamespace(cudnn=SimpleNamespace(version=version))
    found = provenance.of_gpu(SimpleNamespace(cuda=cuda, backends=backends))
    refusal = "cuDNN version incompatibility: 9.15 against 9.13"
    assert found["cudnn"] == (refusal if is_refused else 91500)


@pytest.mark.parametrize("change", [str.upper, lambda text: text.replace("avx2", "avx512f")])
def test_what_the_cpu_can_do_counts(tmp_path: Path, change: Callable[[str], str]) -> None:
    """Another model or other features: other kernels are chosen."""
    described = tmp_path / "cpuinfo"
    described.write_text("model name\t: Xeon\nflags\t: sse avx2\n\nmodel name\t: Xeon\n")
    before = processor(described)
    described.write_text("model name\t: Xeon\nflags\t: avx2 sse\nmhz\t: 2400\n\n")
    assert processor(described) == before
    described.write_text(f"model name\t: {change('Xeon')}\nflags\t: {change('sse avx2')}\n")
    assert processor(described) != before
    assert processor(tmp_path / "none") != before

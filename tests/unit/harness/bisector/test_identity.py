"""Contracts of harness.bisector.identity: all that a verdict rests on is in it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import commit
from harness.bisector import identity
from harness.bisector.identity import identity_of, processor
from harness.machine import Gpu, Machine
from tests.unit.harness.bisector.made_up_asker import case_of, run

GPU = Gpu(id="GPU-1", name="H100", memory_bytes=80)
HERE = Machine(
    cores=2, memory_bytes=8 << 30, system="Linux 6", python="3.12.1", versions={"torch": "2.11"},
    gpus=(GPU,), gpu_driver="550", gpu_note="",
)  # fmt: skip
CASE = case_of(run(), run(graph=("attn",)))


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
    monkeypatch.setattr(identity, "installed_packages", dict)
    before = identity_of(CASE, HERE, {})
    assert before.differs_from(identity_of(CASE, HERE, {"HOME": "/elsewhere"})) == ""
    assert before.differs_from(identity_of(CASE, dataclasses.replace(HERE, **changed), {})) == told


def test_packages_variables_device_and_tokens_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is installed beside torch, what is set, where it runs, and what is read."""
    monkeypatch.setattr(identity, "installed_packages", lambda: {"kernels": "1"})
    before = identity_of(CASE, HERE, {"NCCL_ALGO": "Ring"})
    now = identity_of(CASE, HERE, {"NCCL_ALGO": "Tree"})
    assert before.differs_from(now) == "variable NCCL_ALGO Ring became Tree"
    monkeypatch.setattr(identity, "installed_packages", lambda: {"kernels": "2"})
    now = identity_of(CASE, HERE, {"NCCL_ALGO": "Ring"})
    assert before.differs_from(now) == "package kernels 1 became 2"
    with monkeypatch.context() as other:
        other.setattr(identity, "processor", lambda: "another")
        elsewhere = identity_of(CASE, HERE, {"NCCL_ALGO": "Ring"})
        assert now.differs_from(elsewhere) == f"processor {processor()} became another"
    on_gpu = dataclasses.replace(CASE, candidate=dataclasses.replace(CASE.candidate, device="cuda"))
    elsewhere = identity_of(on_gpu, HERE, {"NCCL_ALGO": "Ring"})
    assert now.differs_from(elsewhere) == "device cpu became cuda"
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(b"12")
    reads = dataclasses.replace(
        CASE,
        candidate=dataclasses.replace(
            CASE.candidate, config=CASE.candidate.config | {"data": {"path": str(tokens)}}
        ),
    )
    before = identity_of(reads, HERE, {})
    tokens.write_bytes(b"123")
    assert "tokens" in before.differs_from(identity_of(reads, HERE, {}))


def test_code_that_git_does_not_know_is_told_by_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two installed versions are two codes, though neither has a commit."""
    monkeypatch.setattr(commit, "describe", lambda: "")
    first = identity_of(CASE, HERE, {})
    assert first.code.startswith("files ")
    package = tmp_path / "harness" / "bisector"
    package.mkdir(parents=True)
    (package / "identity.py").write_text("another")
    monkeypatch.setattr(identity, "__file__", str(package / "identity.py"))
    assert identity_of(CASE, HERE, {}).code not in ("", first.code)


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

"""What ran, and on what: the machine, the commit, the fingerprint that verdicts rest on."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import provenance
from harness.engine import machine
from harness.engine.machine import Gpu, Machine, resolve_device, visible
from harness.errors import Infrastructure
from harness.provenance import (
    changes,
    describe,
    driver,
    everything,
    processor,
    record,
    variables,
)
from harness.runner.launch import Request, prepare, provenance_of
from harness.values import dumps

GPU = Gpu(id="GPU-1", name="H100", memory_bytes=80)
HERE = Machine(
    cores=2, memory_bytes=8 << 30, system="Linux 6", python="3.12.1", versions={"torch": "2.11"},
    gpus=(GPU,), gpu_driver="550", gpu_note="",
)  # fmt: skip


def holds_for(here: Machine, environ: dict[str, str]) -> dict[str, str]:
    """What answers of a search on a machine hold for."""
    return everything(record(json.loads(dumps(here)), {}, environ))


@pytest.mark.parametrize(
    ("changed", "environ", "patched", "told"),
    [
        ({}, {"HOME": "/elsewhere"}, {}, ""),
        ({"versions": {"torch": "2.12"}}, {}, {}, "package torch 2.11 became 2.12"),
        ({"python": "3.12.2"}, {}, {}, "package python 3.12.1 became 3.12.2"),
        ({"gpus": (dataclasses.replace(GPU, name="H200"),)}, {}, {},
         "gpus ['H100'] became ['H200']"),
        ({"gpus": (GPU, GPU)}, {}, {}, "gpus ['H100'] became ['H100', 'H100']"),
        ({"gpu_driver": "560"}, {}, {}, "gpu_driver 550 became 560"),
        ({"cores": 4}, {}, {}, "cores 2 became 4"),
        ({}, {"NCCL_ALGO": "Tree"}, {}, "variable NCCL_ALGO absent became Tree"),
        ({}, {}, {"installed_packages": {"kernels": "2"}}, "package kernels 1 became 2"),
        ({}, {}, {"processor": "another"}, f"processor {processor()} became another"),
    ],
)  # fmt: skip
def test_another_machine_is_another_search(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], environ: dict[str, str],
    patched: dict[str, Any], told: str,
) -> None:  # fmt: skip
    """Packages, GPUs, driver, cores, variables, processor: each is told, from what to what."""
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"kernels": "1"})
    before = holds_for(HERE, {})
    for name, value in patched.items():
        monkeypatch.setattr(provenance, name, lambda value=value: value)
    assert changes(before, holds_for(dataclasses.replace(HERE, **changed), environ)) == told


def test_programs_of_other_scenarios_of_a_folder_are_no_change() -> None:
    """A search is of one program; that its code is another one is told all the same."""
    run, now = ({"programs": dict(each)} for each in ({"a": "1", "b": "1"}, {"a": "2"}))
    assert changes(everything(run, like=now), everything(now)) == "a 1 became 2"


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


def test_a_cudnn_that_pytorch_refuses_is_a_fact() -> None:
    """TransformerEngine, imported first, brings its own: no reason not to record the program."""

    def refused() -> int:
        raise RuntimeError("cuDNN version incompatibility: 9.15 against 9.13. See")

    cuda = SimpleNamespace(
        get_device_name=lambda: "H200", get_device_capability=lambda: (9, 0),
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )  # fmt: skip
    binding = SimpleNamespace(_cudnn=SimpleNamespace(getRuntimeVersion=lambda: (9, 13, 1)))
    for version, told in ((lambda: 91500, 91500), (refused, 91301)):
        backends = SimpleNamespace(cudnn=SimpleNamespace(version=version))
        torch = SimpleNamespace(cuda=cuda, backends=backends, _C=binding)
        assert provenance.of_gpu(torch)["cudnn"] == told


@pytest.mark.parametrize("change", [str.upper, lambda text: text.replace("avx2", "avx512f")])
def test_processor_and_driver_by_the_kernel(tmp_path: Path, change: Callable[[str], str]) -> None:
    """Another model or other features: other kernels are chosen."""
    described = tmp_path / "described"
    described.write_text("model name\t: Xeon\nflags\t: sse avx2\n\nmodel name\t: Xeon\n")
    before = processor(described)
    described.write_text("model name\t: Xeon\nflags\t: avx2 sse\nmhz\t: 2400\n\n")
    assert processor(described) == before
    described.write_text(f"model name\t: {change('Xeon')}\nflags\t: {change('sse avx2')}\n")
    assert processor(described) != before != processor(tmp_path / "none")
    described.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  R\n"
                         "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1)\n")  # fmt: skip
    assert (driver(described), driver(tmp_path / "none")) == ("580.82.07", "")


# --- the machine ---

GPUS = tuple(Gpu(id=f"GPU-{letter}{letter}", name="G", memory_bytes=1) for letter in "abcd")


def make(*, gpus: tuple[Gpu, ...] = (), torch: str = "2.13.0", cores: int = 2) -> Machine:
    """A machine with these GPUs and this torch."""
    return Machine(
        cores=cores, memory_bytes=1, system="s", python="3.12", gpus=gpus, gpu_driver="",
        gpu_note="" if gpus else "no NVIDIA driver", versions={"torch": torch} if torch else {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "here", "device"),
    [("auto", make(), "cpu"), ("auto", make(gpus=GPUS), "cuda"), ("cpu", make(gpus=GPUS), "cpu"),
     ("cuda", make(gpus=GPUS), "cuda"), ("cuda", make(), ""),
     *(("cuda", make(gpus=GPUS, torch=torch), "") for torch in ("2.13.0+cpu", ""))],
)  # fmt: skip
def test_auto_takes_the_gpu_if_torch_can(wanted: str, here: Machine, device: str) -> None:
    """`auto` is cuda where GPUs and a torch built for them are; cuda is never replaced by cpu."""
    if device:
        assert resolve_device(wanted, here) == device
        return
    with pytest.raises(Infrastructure, match="expected a GPU, got none"):
        resolve_device(wanted, here)


def test_auto_does_not_fall_back_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that does not answer, or a torch without CUDA, is refused; hidden GPUs are not."""
    monkeypatch.setattr(machine, "DEVICES", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(init=False))
    (tmp_path / "nvidiactl").touch()
    assert resolve_device("auto", machine.describe_machine({})) == "cpu"
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\n")
    smi.chmod(0o755)
    with pytest.raises(Infrastructure, match=r"nvidia-smi lists GPUs, but .* --device cpu"):
        resolve_device("auto", machine.describe_machine({}))
    (tmp_path / "nvidia0").touch()
    with pytest.raises(Infrastructure, match=r"nvidia0 is there, but .* --device cpu"):
        resolve_device("auto", machine.describe_machine({}))
    assert resolve_device("cpu", machine.describe_machine({})) == "cpu"
    assert resolve_device("auto", machine.describe_machine({"CUDA_VISIBLE_DEVICES": ""})) == "cpu"
    without = dataclasses.replace(make(gpus=GPUS, torch="2+cpu"), gpus_expected="4 x G")
    with pytest.raises(Infrastructure, match=r"the installed torch is 2\+cpu"):
        resolve_device("auto", without)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, "abcd"), ("", ""), ("0", "a"), ("2,0", "ca"), ("1,9,0", "b"), ("-1", ""),
        ("GPU-cc,GPU-a", "ca"), ("0,0", "a"), ("x", ""), (" 3 , 1 ", "db"),
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_cuda_does(devices: str | None, expected: str) -> None:
    """Order counts, and the list ends at the first entry that names nothing."""
    assert "".join(gpu.id[-1] for gpu in visible(GPUS, devices)) == expected


class _NvmlError(Exception):
    pass


def _nvml(*, init: bool = True, answers: bool = True) -> Any:
    """A stand-in for pynvml with two GPUs."""

    def answer(is_given: bool, value: Any = None) -> Any:
        if not is_given:
            raise _NvmlError("lost")
        return value

    return SimpleNamespace(
        NVMLError=_NvmlError, nvmlInit=lambda: answer(init), nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: answer(answers, "580.1"), nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetUUID=lambda i: f"GPU-{i}",
        nvmlDeviceGetName=lambda i: "H", nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=7),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "visible", "gpus", "note"),
    [
        (_nvml(), "1", ["GPU-1"], ""),
        (_nvml(), "", [], "CUDA_VISIBLE_DEVICES= leaves none of 2"),
        (_nvml(init=False), None, [], "no NVIDIA driver"),
        (_nvml(answers=False), None, [], "does not answer"),
        (None, None, [], "nvidia-ml-py is not installed"),
    ],
)
def test_gpus_are_found_through_the_driver(
    module: Any, visible: str | None, gpus: list[str], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that CUDA_VISIBLE_DEVICES leaves; no state of the driver makes it fail."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    here = machine.describe_machine({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [(gpu.id, gpu.name, gpu.memory_bytes) for gpu in here.gpus] == [
        (name, "H", 7) for name in gpus
    ]
    assert note in here.gpu_note
    assert not gpus or (here.gpu_driver, here.gpu_note) == ("580.1", "")


# --- the commit ---


def git(root: Path, *arguments: str) -> str:
    names = ["-c", "user.name=x", "-c", "user.email=x"]
    done = subprocess.run(
        ["git", "-C", str(root), *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit of a package and a README."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "a.py").write_text("a = 1\n")
    (tmp_path / "README.md").write_text("read\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "Begin")
    return tmp_path


def test_changes_on_top_have_a_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed, staged, deleted and new files of code each make another code, others do not;
    neither a hook's variables nor a converter that makes all files look alike hides one, and
    neither a link that leads nowhere, a name that is not UTF-8 nor another owner hides all."""
    head, code = git(root, "rev-parse", "HEAD"), root / "harness"
    (root / "README.md").write_text("changed\n")
    (root / ".git" / "info" / "attributes").write_text("*.py diff=same\n")
    git(root, "config", "diff.same.textconv", "true")
    seen = [describe(root)]
    for name, text in (("c.py", "c = 1\n"), ("a.py", "a = 2\n"), ("b.py", "b = 1\n"),
                       ("b.py", "b = 2\n")):  # fmt: skip
        (code / name).write_text(text)
        seen.append(describe(root))
        assert describe(root) == seen[-1]
        assert seen[-1].startswith(f"{head}+")
    for name in ("b.py", "c.py"):
        (code / name).unlink()
    seen.append(describe(root))
    git(root, "add", ".")
    assert describe(root) == seen[-1]
    (code / "a.py").unlink()
    seen.append(describe(root))
    assert (seen[0], len(set(seen))) == (head, len(seen))
    other = root.parent / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))
    assert describe(root) == seen[-1]
    (code / ".#a.py").symlink_to("user@host.1234")  # an editor's lock
    os.link(root / "README.md", os.fsencode(code) + b"/\xff.py")
    with_latin_name = describe(root)
    assert with_latin_name.startswith(f"{head}+")
    assert with_latin_name != seen[-1]
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert describe(root) == with_latin_name


PROGRAM = """\
{name: p, why: A program., program: {script: train.py, ranks: 1, steps: 2},
 axes: {args.mode: [a, b]}, compare: {axis: args.mode, reference: a, expect: bitwise},
 checks: {loss: {}, state: {}}, launch: {device: cpu}}
"""


def planned(folder: Path) -> tuple[str, str]:
    """The commit of a program under test, and a hash of its code, as a manifest says them."""
    (folder / "p.yaml").write_text(PROGRAM)
    prepared = prepare(Request(paths=(folder / "p.yaml",)))
    manifest = provenance_of(prepared.machine, prepared.plan.cases)
    (code,) = manifest["programs"].values()
    return str(manifest["commit"]), str(code)


def test_a_program_has_the_commit_of_its_own_repository(root: Path) -> None:
    """With what lies on top, new scripts too."""
    (root / "train.py").write_text("pass\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "Train")
    head = git(root, "rev-parse", "HEAD")
    seen = [planned(root)[0]]
    for path in ("README.md", "train.py", "helper.py"):
        (root / path).write_text("changed = 1\n")
        seen.append(planned(root)[0])
    assert (seen[0], len(set(seen))) == (head, 4)
    assert all(each.startswith(f"{head}+") for each in seen[1:])


def test_a_program_in_no_repository_is_named_by_its_code(tmp_path: Path) -> None:
    """Packages next to it are a part of it, what it leaves with its results is none."""
    for path in ("train.py", "parts/__init__.py", "parts/deep/__init__.py", "parts/deep/a.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("pass\n")
    (tmp_path / "parts/again").symlink_to(tmp_path / "parts")
    seen = [planned(tmp_path)]
    for path in ("results/train.py", "train.py", "parts/deep/a.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("changed = 1\n")
        seen.append(planned(tmp_path))
    assert seen[0] == seen[1]
    assert [len(set(each)) for each in zip(*seen, strict=True)] == [3, 3]


def test_no_repository_is_no_commit(tmp_path: Path, root: Path) -> None:
    """Outside, in a repository that the code is no part of, or without a commit: unknown."""
    assert describe(tmp_path / "nothing") == ""
    site = root / "site-packages"
    (site / "harness").mkdir(parents=True)
    (site / "harness" / "a.py").write_text("")
    assert describe(site) == ""
    empty = tmp_path / "empty"
    (empty / "harness").mkdir(parents=True)
    git(empty, "init", "--quiet")
    assert describe(empty) == ""

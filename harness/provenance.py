"""The one fingerprint of the environment: what made a run, and on what.

    of a rank     in its start record      `of_rank` must agree between runs whose bits are compared
                                           `about_rank` only says: commit, host, GPU
    of a folder   in its manifest          `record`: code, packages, variables, hardware, programs

Read by the gates of a verdict (`harness.checks.evidence`), `--resume` (`deciding`), the history and
the bisector (`facts`, `everything`). Values have no secrets, a host is a hash of its name. Needs
nothing but the standard library: the recorder uses it in a program's own environment.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.masking import Masker, is_telling

PACKAGES = ("fsdp_core", "harness")
TIMEOUT_S = 30.0
HASH_CHARS = 8
_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")

FINGERPRINT = "fingerprint"  # of a start record's environment: the part that gates verdicts
CODE_VARIABLE, COMMIT_VARIABLE = "DELTAZERO_CODE", "DELTAZERO_COMMIT"
HOST_KEY, SHARED_HOST = "NCCL_HOSTID", "shared-gpus"
"""A variable, and how its value begins where ranks share GPUs (`harness/engine/machine.py` has the
reason): their times mean nothing."""
PROGRAM_VARIABLE = "DELTAZERO_PROGRAM"
"""What a harness tells its ranks of the files that they started from, its own and a program's."""
PROGRAMS_KEY = "programs"  # of a manifest: name of a program to a hash of its code
MAX_SHOWN_CHARS, MOST_SHOWN = 60, 4

_NUMERIC = re.compile(
    r"ATEN_CPU_CAPABILITY|CUBLAS\w*|CUDA_(?:LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER"
    r"|MODULE_LOADING)|CUDNN_\w+|DNNL_\w+|GOMP_\w+|KMP_\w+|MKL_\w+|NCCL_\w+|NVIDIA_TF32_OVERRIDE"
    r"|NVTE_\w+|OMP_(?:DYNAMIC|NUM_THREADS|SCHEDULE|THREAD_LIMIT)|ONEDNN_\w+|OPENBLAS_\w+"
    r"|PYTHONHASHSEED|PYTORCH_\w+|TORCHDYNAMO_\w+"
    r"|TORCHINDUCTOR_\w+|TORCH_\w+|TRITON_\w+"
)
_OF_NO_NUMBER = re.compile(
    r"\w+_(?:DIR|FILE|HOME|PATH|PREFIX|SOCKET_IFNAME)|NCCL_DEBUG\w*|TORCH_FR_\w+"
    r"|TORCH_LOGS\w*|TORCH_NCCL_(?:DEBUG|DUMP|TRACE)_\w+|TORCH_TRACE"
)
"""Of those above: where files go, what is printed or recorded, which network card is used."""
_DRIVER, _PROCESSOR = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")
_HEAD_BYTES = 16 << 10
"""Of /proc/cpuinfo: the first processor. The kernel asks each of them as it is read."""

_NOUNS = {"packages": "package ", "variables": "variable ", "driver": "", "hardware": ""}
"""Kinds of facts, and what stands before a name that says nothing by itself."""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that decide bits, without secrets."""
    masker = Masker(environ)
    return {name: masker.text(value) for name, value in sorted(environ.items()) if _decides(name)}


def _decides(name: str) -> bool:
    is_numeric = _NUMERIC.fullmatch(name) is not None and _OF_NO_NUMBER.fullmatch(name) is None
    return is_numeric and not is_telling(name)


# --- of a rank --------------------------------------------------------------------------------


def of_rank(torch: Any, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What decides the bits of a process on any device; `torch` is the module."""
    return {
        "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "machine": platform.machine(), "processor": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(), "environment": variables(environ),
    }  # fmt: skip


def of_gpu(torch: Any) -> dict[str, Any]:
    """The same of its current GPU; only for a process that uses it."""
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError:
        # Older than PyTorch was built for, as where TransformerEngine is imported first.
        major, minor, patch = torch._C._cudnn.getRuntimeVersion()
        cudnn = 10_000 * major + 100 * minor + patch
    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()), "driver": driver(),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()), "cudnn": cudnn,
    }  # fmt: skip


def of_program(packages: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The same of a program that was asked to run with some packages."""
    return {
        "packages": {name: package_version(name) for name in packages},
        **({"program": environ[PROGRAM_VARIABLE]} if PROGRAM_VARIABLE in environ else {}),
    }


def about_rank(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Where a process runs and by which commit; ranks of equal `host` share a machine."""
    found = {"commit": environ.get(COMMIT_VARIABLE, ""), "host": host()}
    return found | ({"gpu": gpu} if (gpu := own_gpu(environ)) else {})


def own_gpu(environ: Mapping[str, str] = os.environ) -> str:
    """The GPU of a rank, as CUDA_VISIBLE_DEVICES names it; "" without, or if nobody says."""
    seen = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    place = environ.get("LOCAL_RANK", "")
    return seen[int(place)] if place.isdecimal() and int(place) < len(seen) else ""


def of_job(environ: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], dict[str, str]]:
    """What a job that nobody but itself records says of its program: for the fingerprint, and
    about it. Of the first rank of each machine: it reads the files of all packages, and asks git.
    """
    if environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", "0")) != "0":
        return {}, {}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    command = " ".join(Masker(environ).words(sys.argv))
    return (
        {"packages": installed_packages(), "program": code_of_scripts(folder)},
        {"commit": commit_of(folder), "command": command},
    )


def code_variables() -> dict[str, str]:
    """Variables for ranks: the code that they are started from."""
    return {CODE_VARIABLE: code(), COMMIT_VARIABLE: describe()}


def fingerprint(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a start record's environment that gates verdicts; all of it without a mark."""
    inner = environment.get(FINGERPRINT)
    return inner if isinstance(inner, Mapping) else environment


# --- facts ------------------------------------------------------------------------------------


def processor(described: Path = _PROCESSOR) -> str:
    """The model of the CPU and a hash of what it can do: kernels are chosen by that."""
    try:
        with described.open("rb") as file:
            text = file.read(_HEAD_BYTES).decode(errors="replace").strip().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in text.splitlines())
    known = {name.strip(): value.strip() for name, _, value in lines}
    features = " ".join(sorted((known.get("flags") or known.get("Features") or "").split()))
    model = known.get("model name") or known.get("CPU part") or platform.machine()
    return f"{model} {hashlib.sha256(features.encode()).hexdigest()[:8]}"


def driver(described: Path = _DRIVER) -> str:
    """Version of the GPUs' kernel driver, "" where there is none to be seen."""
    try:
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", described.read_text(errors="replace"))
    except OSError:
        return ""
    return found[0] if found else ""


def host() -> str:
    """A name for this machine that tells nobody which it is."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def package_version(name: str) -> str:
    """Version of an installed package, or "" if it is absent; the package is not imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_packages() -> dict[str, str]:
    """Version of every installed package, by name."""
    found = ((each.metadata["Name"], each.version) for each in importlib.metadata.distributions())
    return {name: version for name, version in sorted(found, key=str) if name}


def code(root: Path | None = None) -> str:
    """Names the contents of the packages' files: equal for commits that touch other files only."""
    root = root or Path(__file__).parents[1]
    files = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    named = (f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"".join(named)).hexdigest()[:16]


def code_of_scripts(folder: Path) -> str:
    """A hash of the scripts in a folder, and of the packages next to them."""
    digest = hashlib.sha256()
    for path in _scripts(folder):
        with suppress(OSError):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _scripts(folder: Path) -> Iterator[Path]:
    # Packages only: copies of its code that a program leaves with its results are none.
    yield from sorted(folder.glob("*.py"))
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        if not package.is_symlink():
            yield from _scripts(package)


def code_of_program(folder: Path) -> str:
    """As `code_of_scripts`, with the state of the repository that the folder is in."""
    digest = hashlib.sha256(code_of_scripts(folder).encode())
    with suppress(OSError, subprocess.SubprocessError):
        for words in (("rev-parse", "HEAD"), ("diff", "HEAD", "--binary", "--no-ext-diff")):
            digest.update(git(folder, *words))
    return digest.hexdigest()[:16]


# --- of a folder ------------------------------------------------------------------------------


def record(
    machine: Mapping[str, Any], programs: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ, commit: str = "",
) -> dict[str, Any]:  # fmt: skip
    """What a manifest says of the environment: `machine` as JSON, the code of programs by name,
    and the `commit` under test, by default that of this package."""
    return {
        "machine": machine, "processor": processor(), "packages": installed_packages(),
        "commit": commit or describe(), "code": code(), PROGRAMS_KEY: dict(programs or {}),
        "environment": {"python": platform.python_version(), "variables": variables(environ)},
    }  # fmt: skip


def facts(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a manifest says of its machine, name to value by kind; without what is unknown."""
    machine = manifest.get("machine") or {}
    stored = (manifest.get("environment") or {}).get("variables") or {}
    found = {"variables": {name: v for name, v in stored.items() if _decides(str(name))}}
    if not machine:
        return found
    model = manifest.get("processor")
    return found | {
        "packages": {
            "python": machine.get("python"), **machine.get("versions", {}),
            **(manifest.get("packages") or {}),
        },
        "driver": {"gpu_driver": machine.get("gpu_driver")},
        "hardware": {
            "cores": machine.get("cores"),
            # Whole GiB: what a kernel keeps for itself differs from boot to boot.
            "memory_gib": round(int(machine.get("memory_bytes") or 0) / 2**30),
            "system": machine.get("system"), "gpus": [gpu["name"] for gpu in machine["gpus"]],
            **({"processor": model} if model else {}),
        },
    }  # fmt: skip


def _named(manifest: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
    named, found = dict(manifest.get(PROGRAMS_KEY) or {}), facts(manifest)
    for kind in kinds:
        named |= {f"{_NOUNS[kind]}{name}": v for name, v in found.get(kind, {}).items()}
    return named


def deciding(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same where runs of one folder are made in several sittings, by name.

    Not the machine: ranks record it, and a verdict over two of them says so.
    """
    return {"code": manifest.get("code")} | _named(manifest, "packages", "variables")


def everything(
    manifest: Mapping[str, Any], like: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """All facts but the commit, by name, as text: what answers of a search hold for.

    Of programs those of the manifest `like` alone: a run folder may hold other scenarios' as well.
    """
    programs = (manifest if like is None else like).get(PROGRAMS_KEY) or {}
    others = dict(manifest.get(PROGRAMS_KEY) or {}).keys() - dict(programs).keys()
    named = _named(manifest, *_NOUNS).items()
    return {name: str(v) for name, v in named if name not in others}


# --- differences ------------------------------------------------------------------------------


def flat(name: str, value: object) -> dict[str, Any]:
    """A nested value by dotted names."""
    if isinstance(value, Mapping) and value:
        inner = ((f"{name}.{key}" if name else str(key), entry) for key, entry in value.items())
        return {path: leaf for key, entry in inner for path, leaf in flat(key, entry).items()}
    if isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
        return flat(name, {str(place): entry for place, entry in enumerate(value)})
    return {name: value}


def different(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Names in which two flat mappings differ, in order; 1 and True are not equal here."""
    names = [*left, *(name for name in right if name not in left)]
    return [n for n in names if (n in left) != (n in right) or repr(left[n]) != repr(right[n])]


def told(values: Mapping[str, Any], name: str) -> str:
    """A value for people, cut to a readable length."""
    text = str(values[name]) if name in values else "absent"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"


def changes(left: Mapping[str, Any], right: Mapping[str, Any], most: int = MOST_SHOWN) -> str:
    """What became of a flat mapping: 'package torch 2.11 became 2.12'; "" if it is the same."""
    names = different(left, right)
    words = [f"{n} {told(left, n)} became {told(right, n)}" for n in names[:most]]
    return "; ".join([*words, *([f"{len(names) - most} more"] if len(names) > most else [])])


# --- the commit -----------------------------------------------------------------------------


def describe(root: Path | None = None) -> str:
    """The code under `root`, by default where this package lies; never an exception."""
    root = root or Path(__file__).parents[1]
    folders = [name for name in PACKAGES if (root / name).is_dir()]
    return _commit(root, folders, folders, folders) if folders else ""


def commit_of(folder: Path) -> str:
    """The commit of the repository that a program lies in, with a hash of changes; "" without."""
    return _commit(folder, ["."], [":/"], ["*.py"])


def commit_of_program(folder: Path) -> str:
    """As `commit_of`; a hash of the program's code if it is in no repository."""
    return commit_of(folder) or f"+{code_of_scripts(folder)[:HASH_CHARS]}"


def _commit(
    root: Path, parts: Sequence[str], changing: Sequence[str], adding: Sequence[str]
) -> str:  # fmt: skip
    """The commit of which `parts` are a part, with a hash of changes of `changing` and of new files
    that fit `adding`; "" if there is none."""
    new = ("ls-files", "--others", "--exclude-standard", "-z", "--", *adding)
    try:
        commit = git(root, "rev-parse", "--verify", "HEAD").decode().strip()
        # A package in site-packages may lie inside somebody's repository without being part of it.
        if not git(root, "ls-files", "--", *parts):
            return ""
        changed = git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--",
                      *changing)  # fmt: skip
        digest, names = hashlib.sha256(changed), sorted(git(root, *new).split(b"\0"))
        # Links that lead nowhere are no code: editors lock files with them.
        added = [name for name in names if (root / os.fsdecode(name)).is_file()]
        for name in added:
            digest.update(name + b"\0" + (root / os.fsdecode(name)).read_bytes())
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}+{digest.hexdigest()[:HASH_CHARS]}" if changed or added else commit


def git(root: Path, *arguments: str) -> bytes:
    """What git prints of the repository at `root` (`OSError`, `SubprocessError`: it says no)."""
    # --no-optional-locks: looking must not get in the way of whoever works in the repository.
    # Its owner may be another user, as in containers: code that we run is trusted already.
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", str(root), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, timeout=TIMEOUT_S, env=outside_hooks()
    ).stdout


def outside_hooks() -> dict[str, str]:
    """Our environment without the variables of a hook of git, which name the hook's repository,
    whatever -C says."""
    return {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}

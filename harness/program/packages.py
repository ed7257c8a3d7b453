"""Environments for the package versions that a user's program asks for.

    request {"megatron-fsdp": "0.6.1"} -> lock ["einops==0.8.2", "megatron-fsdp==0.6.1"] -> overlay

pip resolves the request from its configured index against the base interpreter: what is installed
there serves as it is, and torch with its libraries is held to its version. The overlay holds the
packages of the lock and sees every other one of the base. What was built for one release of torch
and cannot be imported beside the base's, as PyPI's torchvision beside torch for the CPU, is left
out, and a line says so. It lies in a folder of the cache that is named by a hash of the request,
and is half made until it has its `environment.json`, the lock.

A request that is in the cache needs neither network nor pip, and its lock stays what it was: to
resolve it anew, delete its folder. Overlays are built in place, since installed scripts hold paths.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import Infrastructure, UsageError, shown
from harness.store.files import write_atomic

Say = Callable[[str], None]

SHOWN_VERSIONS = 8
BINDINGS = ("nvidia-cudnn-frontend", "nvidia-ml-py")
"""Packages named like torch's libraries that hold none."""
LOCK, LEFT_OUT = "environment.json", "left_out.txt"

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9._,-]+\])?")
_VERSION = r"[0-9][A-Za-z0-9.+!_-]*"
_CLAUSES = re.compile(rf"(?:(?:^|,)\s*(?:===?|~=|!=|<=?|>=?)\s*{_VERSION}(?:\.\*)?\s*)+")
A_VERSION = 'a version as "0.6.1" or a specifier as ">=2,<3"'
_FINAL = re.compile(r"[0-9.]+(?:\.post[0-9]+)?")
_PROBE = """
import importlib.metadata as m, json, platform, sys
print(json.dumps({
    "prefix": sys.prefix, "version": platform.python_version(),
    "sites": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
    "installed": {d.metadata["Name"]: d.version for d in reversed(list(m.distributions()))}}))
"""
_MISFITS = """
import importlib, importlib.metadata as m, json, re, sys
found = {}
for lock in sys.argv[1:]:
    name = lock.split("==")[0]
    if any(re.match(r"torch *[(]?==", each) for each in m.requires(name) or ()):
        try:
            importlib.import_module(name.replace("-", "_"))
        except Exception as error:
            found[lock] = f"{type(error).__name__}: {error}".partition("\\n")[0]
print(json.dumps(found))
"""
"""Which of a lock were built for one release of torch and cannot be imported, and why."""
_HIDDEN = """
import importlib.metadata as m, json, sys
found = [(lock, m.distribution(lock.split("==")[0])) for lock in sys.argv[1:]]
wrong = [(k, d.version, str(d.locate_file(""))) for k, d in found if k.split("==")[1] != d.version]
print(json.dumps(wrong[:1]))
"""
"""Which of a lock is hidden by another: wanted, version found, and where; the first one."""


def prepare(
    packages: Mapping[str, str], *, python: Path = Path(sys.executable), cache: Path | None = None,
    say: Say = lambda text: None,
) -> Path:  # fmt: skip
    """The interpreter of an environment of `python` that has `packages`, made unless it is cached.

    Args:
        packages: exact versions or specifiers (">=2,<3") by name; none of them: `python` itself.
        cache: a folder; by default $DELTAZERO_CACHE, else deltazero/packages in the user's cache.
        say: is called with one line for each thing that takes time or network.

    Raises:
        UsageError: no such release, releases that conflict, or one that needs another torch.
        Infrastructure: no network, no pip, no room on the disk.
    """
    python = python.absolute()  # to resolve a link would leave its environment
    if not packages:
        return python
    requirements = sorted(_requirement(name, version) for name, version in packages.items())
    base = _ask(python, _PROBE)
    installed = {_canonical(name): version for name, version in base["installed"].items() if name}
    request = [requirements, base["prefix"], base["version"], installed.get("torch", "")]
    key = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:20]
    cache = cache or _default_cache()
    folder = cache.absolute() / key
    try:
        with _locked(folder, say):
            if not (folder / LOCK).exists():
                lock = _resolve(requirements, python, installed, say)
                _make(folder, lock, python, base["sites"], installed.get("torch", ""))
            lock = json.loads((folder / LOCK).read_text())
            left_out = (folder / LEFT_OUT).read_text() if (folder / LEFT_OUT).exists() else ""
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if is_full else str(error)
        raise Infrastructure(f"packages: cannot write to the cache {cache}: {reason}") from None
    locked = {each.partition("==")[0] for each in lock}
    if left_out and {_canonical(name.partition("[")[0]) for name in packages} - locked:
        raise UsageError(left_out)
    if left_out:
        say(left_out)
    python = folder / "bin" / "python"
    for wanted, got, place in _ask(python, _HIDDEN, *lock):
        raise UsageError(
            f"packages: expected {wanted}, got {got} from {place}; is that on PYTHONPATH?"
        )
    return python


def releases(name: str, first: str, last: str, python: Path) -> list[str]:
    """The published versions of `name` from `first` to `last`, both included, oldest first.

    Development and pre-releases are left out unless `first` or `last` is one.

    Raises:
        UsageError: the index lacks `name`, `first` or `last`, or they are in the wrong order.
        Infrastructure: no network, no pip.
    """
    wanted = [_requirement(name, first), _requirement(name, last)]
    final = _FINAL.fullmatch(first) and _FINAL.fullmatch(last)
    output = _pip(python, "index", "versions", name, *([] if final else ["--pre"]))
    versions = "".join(re.findall(r"^Available versions: (.+)$", output, re.M)).split(", ")[::-1]
    spelled = {re.sub(r"(\.0)+$", "", version): version for version in versions}  # 2.0 is 2.0.0
    first, last = (spelled.get(re.sub(r"(\.0)+$", "", each), each) for each in (first, last))
    for version, requirement in zip((first, last), wanted, strict=True):
        if version not in versions:
            raise _no_release(requirement, versions)
    between = versions[versions.index(first) : versions.index(last) + 1]
    if not between:
        raise UsageError(f"packages: {name}: expected {first} to be older than {last}")
    return between


# ---- request -> lock -> environment


def _default_cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DELTAZERO_CACHE") or root / "deltazero" / "packages").expanduser()


def _requirement(name: str, version: str) -> str:
    """What pip is asked for; nothing but a name and versions gets through."""
    if not NAME.fullmatch(name):
        raise UsageError(f"packages: expected the name of a package, got {shown(name)}")
    if not is_version(version):
        raise UsageError(f"packages: {name}: expected {A_VERSION}, got {shown(version)}")
    given = re.sub(r"\s", "", version)
    return f"{name}=={given}" if given[0].isalnum() else f"{name}{given}"


def is_version(text: str) -> bool:
    """Whether pip can be asked for it: a version, or bounds on it."""
    return bool(re.fullmatch(_VERSION, text) or _CLAUSES.fullmatch(text))


def _resolve(
    requirements: Sequence[str], python: Path, installed: Mapping[str, str], say: Say
) -> list[str]:
    """The lock: what pip would install, and what the base has of the request."""
    say(f"packages: resolving {', '.join(requirements)}")
    with tempfile.TemporaryDirectory() as folder:
        report, held = Path(folder, "report.json"), Path(folder, "held.txt")
        held.write_text("".join(f"{n}=={v}\n" for n, v in installed.items() if _is_torch(n)))
        options = ["--dry-run", "--report", str(report), "--constraint", str(held)]
        _pip(python, "install", *options, *requirements)
        items = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    lock = {_canonical(item["name"]): item["version"] for item in items}
    for name in filter(_is_torch, lock):  # a library that the base's torch was built without
        asked = [
            f"{item['name']} {item['version']}"
            for item in items
            for wanted in item.get("requires_dist", ())
            if _canonical(re.split(r"[^\w.-]", wanted)[0]) == name
        ]
        raise UsageError(
            f"packages: {', '.join(asked) or 'the request'} would add {name} {lock[name]} to the"
            f" torch of {python}; expected packages that do without"
        )
    if lock:
        say(f"packages: installing {', '.join(f'{n} {v}' for n, v in sorted(lock.items()))}")
    for name in (_canonical(re.split(r"[\[=~!<>]", each)[0]) for each in requirements):
        lock.setdefault(name, installed.get(name, ""))
    return sorted(f"{name}=={version}" for name, version in lock.items())


def _is_torch(name: str) -> bool:
    libraries = name.startswith("nvidia-") and name not in BINDINGS
    return libraries or name in ("torch", "triton", "pytorch-triton")


def _make(folder: Path, lock: list[str], base: Path, sites: Sequence[str], torch: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what a killed process left of it
    _run(str(base), "-P", "-m", "venv", "--without-pip", str(folder))
    # A venv made from a venv does not see its packages; `addsitedir` also reads .pth files.
    lines = (f"import site; site.addsitedir({site!r})\n" for site in sites)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "base_packages.pth").write_text("".join(lines))
    python = folder / "bin" / "python"
    _pip(python, "install", "--no-deps", *lock)
    if misfits := _ask(python, _MISFITS, *lock):
        _pip(python, "uninstall", "--yes", *(each.partition("==")[0] for each in misfits))
        told = "; ".join(f"{lock} ({why})" for lock, why in misfits.items())
        write_atomic(folder / LEFT_OUT, f"packages: not beside torch {torch}, so left out: {told}")
    write_atomic(folder / LOCK, json.dumps([each for each in lock if each not in misfits]))


# ---- processes and files


def _ask(python: Path, code: str, *arguments: str) -> Any:
    output = _run(str(python), "-P", "-c", code, *arguments)
    return json.loads(next(line for line in output.splitlines() if line[:1] in ("{", "[")))


def _pip(python: Path, verb: str, *arguments: str) -> str:
    options = ["--no-input", "--disable-pip-version-check"]
    return _run(str(python), "-P", "-m", "pip", verb, *options, *arguments)


def _run(*command: str) -> str:
    # The user's defaults for installations elsewhere would refuse or redirect ours.
    extra = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            errors="replace", check=False, env={**os.environ, **extra},
        )  # fmt: skip
    except (FileNotFoundError, PermissionError) as error:
        raise Infrastructure(f"packages: expected a Python interpreter: {error}") from None
    if done.returncode:
        raise _cause(done.stdout, command[0])
    return done.stdout


_CAUSES: tuple[tuple[str, type[UsageError] | type[Infrastructure], str], ...] = (
    (r"No module named '?pip\b", Infrastructure, "{python} has no pip"),
    (r"No space left on device|Disk quota exceeded", Infrastructure, "the disk is full"),
    (r"after connection broken by|timed out", Infrastructure, "the index cannot be reached"),
    (r"The conflict is caused by:\n((?: +.+\n)+)", UsageError, "no releases fit each other: {0}"),
)
"""What pip's output says of a failure. The only place where text decides; a test an entry."""


def _cause(output: str, python: str) -> UsageError | Infrastructure:
    missing = re.search(r"satisfies the requirement (.+) \(from versions: (.*)\)", output)
    if missing and missing[2] != "none":
        return _no_release(missing[1], missing[2].split(", "))
    for pattern, kind, text in _CAUSES:
        if found := re.search(pattern, output):
            lines = (line.strip() for group in found.groups() for line in group.splitlines())
            return kind("packages: " + text.format("; ".join(lines), python=python))
    if nowhere := missing or re.search(r"No matching distribution found for (.+)", output):
        return _no_release(nowhere[1], [])
    errors = re.findall(r"^\s*(?:ERROR|error): (.+)", output, re.MULTILINE)
    last = (errors or output.strip().splitlines() or ["no output"])[-1]
    return Infrastructure(f"packages: {python} failed: {last}")


def _no_release(wanted: str, versions: Sequence[str]) -> UsageError:
    """`versions`: oldest first; final ones are shown if there are any."""
    legal = [v for v in versions if _FINAL.fullmatch(v)] or list(versions)
    some = f"some legal values: {', '.join(legal[-SHOWN_VERSIONS:])}"
    return UsageError(
        f"packages: expected a release that the index has for this interpreter, got {wanted}; "
        + (some if legal else "it has none, or cannot be reached")
    )


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Keep other processes from `path`; the system lifts the lock of one that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("packages: waiting for another process that makes the same environment")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

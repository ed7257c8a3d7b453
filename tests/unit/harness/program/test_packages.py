"""Environments for requested versions, from tiny wheels in a folder in place of an index."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from harness.errors import Infrastructure, UsageError
from harness.program.packages import LOCK, Say, prepare, releases
from tests.support.fake_engine import Patch

BASE = Path(sys.executable)


def make_wheel(folder: Path, name: str, version: str, *requires: str, code: str = "") -> Path:
    """A wheel of one module that knows its version."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        f"{name}.py": f"VERSION = {version!r}\n{code}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder that pip takes releases from, and nothing else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "index"
    make_wheel(folder, "tiny", "1.0", "helper>=2")
    for version in ("1.1", "1.10", "1.2rc1"):
        make_wheel(folder, "tiny", version)
    make_wheel(folder, "helper", "2.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class Requests:
    """Requests to one cache, with what was said."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.said: list[str] = []

    def __call__(self, *, python: Path = BASE, **packages: str) -> Path:
        return prepare(packages, python=python, cache=self.cache, say=self.said.append)


@pytest.fixture
def request_for(tmp_path: Path, index: Path) -> Requests:
    return Requests(tmp_path / "cache")


def seen(python: Path, code: str) -> str:
    """What `code` prints in the environment."""
    run = [str(python), "-c", code]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


def lock(python: Path) -> list[str]:
    found: list[str] = json.loads((python.parents[1] / LOCK).read_text())
    return found


def interpreter(folder: Path, *, pip_says: str) -> Path:
    """An interpreter whose pip prints a text and fails."""
    (folder / "text").write_text(pip_says)
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m pip"*) cat {folder}/text; exit 1;; esac\nexec {BASE} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_an_overlay_has_the_lock_and_sees_the_base(
    request_for: Requests, index: Path, monkeypatch: Patch
) -> None:
    """Dependencies are in the lock; what is in the cache is found again and needs no index."""
    assert request_for() == BASE
    assert not request_for.cache.exists()
    python = request_for(tiny="1.0")
    assert lock(python) == ["helper==2.1", "tiny==1.0"]
    assert request_for.said[-1] == "packages: installing helper 2.1, tiny 1.0"
    assert seen(python, "import pytest, tiny, helper; print(tiny.VERSION)") == "1.0"
    assert python.is_relative_to(request_for.cache)
    version = metadata.version("iniconfig")
    assert lock(request_for(iniconfig=version)) == [f"iniconfig=={version}"]
    make_wheel(index, "iniconfig", "0.0.1")
    over = request_for(iniconfig="0.0.1")
    assert seen(over, "import iniconfig; print(iniconfig.VERSION)") == "0.0.1"
    request_for.said.clear()
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert request_for(tiny="1.0") == python
    assert not request_for.said


def test_torch_and_its_libraries_are_never_replaced(request_for: Requests, index: Path) -> None:
    """The error names who asks and what stays; a specifier leaves room, and bindings are added."""
    for name, version, *needs in (
        ("torch", "99.0"), ("greedy", "3.0", "torch>=99"), ("nvidia_fake_cu99", "1.0"),
        ("wants", "1.0", "nvidia-fake-cu99>=1 ; python_version > '3'"),
        ("nvidia_cudnn_frontend", "1.0"), ("binds", "1.0", "nvidia-cudnn-frontend"),
    ):  # fmt: skip
        make_wheel(index, name, version, *needs)
    for asked, words in (
        ({"greedy": "3.0"}, r"greedy 3\.0 depends on torch>=99; .* torch=="),
        ({"torch": "99.0"}, r"requested torch==99\.0; .* torch==2"),
        ({"wants": "1.0"}, r"wants 1\.0 would add nvidia-fake-cu99 1\.0"),
    ):
        with pytest.raises(UsageError, match=words):
            request_for(**asked)  # type: ignore[arg-type]
    assert not list(request_for.cache.glob("*/bin"))
    make_wheel(index, "greedy", "2.0", "torch>=2")
    within = request_for(greedy=">=1, <3")
    assert lock(within) == ["greedy==2.0"]
    assert request_for(greedy=">=1, <3") == within
    assert lock(request_for(binds="1.0")) == ["binds==1.0", "nvidia-cudnn-frontend==1.0"]


def test_what_was_built_for_another_torch_is_left_out(request_for: Requests, index: Path) -> None:
    """One line says so, each time; what can be imported beside this torch stays, as does the
    package that wanted it; asked for by name it is refused."""
    pin = f"torch=={metadata.version('torch').partition('+')[0]}"
    make_wheel(index, "vision", "1.0", pin, code="raise RuntimeError('no nms')\n")
    make_wheel(index, "sound", "1.0", pin)
    make_wheel(index, "models", "1.0", "vision", "sound")
    request_for(models="1.0")
    request_for.said.clear()
    python = request_for(models="1.0")
    assert "left out: vision==1.0 (RuntimeError: no nms)" in request_for.said[-1]
    assert lock(python) == ["models==1.0", "sound==1.0"]
    assert seen(python, "import importlib.util as u; print(u.find_spec('vision'))") == "None"
    with pytest.raises(UsageError, match="left out: vision"):
        request_for(vision="1.0")


def test_unknown_versions_name_those_that_exist(request_for: Requests, index: Path) -> None:
    """An unknown version or name, requested or needed, is the user's, on one line."""
    make_wheel(index, "deep", "1.0", "helper>=3")
    for asked, words in (
        ({"tiny": "7.5"}, r"got tiny==7\.5; some legal values: 1\.0, 1\.1, 1\.10"),
        ({"nowhere": "1.0"}, "got nowhere==1.0; it has none, or cannot be"),
        ({"deep": "1.0"}, r"helper>=3 \(from deep\); some legal values: 2\.1"),
    ):
        with pytest.raises(UsageError, match=words):
            request_for(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "version"),
    [("tiny", "--index-url=x"), ("tiny", "1.0 @ file:/x"), ("tiny", ""), ("-r", "1"), ("a b", "1")],
)
def test_nothing_but_names_and_versions_reaches_pip(
    request_for: Requests, name: str, version: str
) -> None:
    with pytest.raises(UsageError, match="expected"):
        request_for(**{name: version})  # type: ignore[arg-type]
    assert not request_for.said


def test_a_hidden_version_is_refused(
    request_for: Requests, tmp_path: Path, monkeypatch: Patch
) -> None:
    """What PYTHONPATH puts before the overlay would run in its place, also from the cache."""
    request_for(tiny="1.1")
    with zipfile.ZipFile(make_wheel(tmp_path, "tiny", "9.0")) as wheel:
        wheel.extractall(tmp_path / "before")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "before"))
    with pytest.raises(
        UsageError, match=r"expected tiny==1\.1, got 9\.0 from .*before.*PYTHONPATH"
    ):
        request_for(tiny="1.1")


def test_two_at_once_make_one_environment(request_for: Requests) -> None:
    """The second process waits for the first and finds its work done."""
    working, waiting, results, said = threading.Event(), threading.Event(), [], list[str]()

    def make(say: Say) -> None:
        results.append(prepare({"tiny": "1.0"}, python=BASE, cache=request_for.cache, say=say))

    def first_says(line: str) -> None:
        if "resolving" in line:
            working.set()
            assert waiting.wait(60)

    def second_says(line: str) -> None:
        said.append(line)
        waiting.set()

    thread = threading.Thread(target=make, args=(first_says,))
    thread.start()
    assert working.wait(60)
    make(second_says)
    thread.join()
    assert results[0] == results[1]
    assert said == ["packages: waiting for another process that makes the same environment"]


KILLED_BEFORE_INSTALLING = """
import os, pathlib, signal, sys
from harness.program.packages import prepare

def watch(event, arguments):
    if event == "subprocess.Popen" and "--no-deps" in arguments[1]:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
python, cache = pathlib.Path(sys.executable), pathlib.Path(sys.argv[1])
prepare({"tiny": "1.0"}, python=python, cache=cache, say=print)
"""


def test_a_half_made_environment_is_made_again(request_for: Requests) -> None:
    """A process that was killed leaves neither a lock nor an environment that is believed."""
    command = [sys.executable, "-c", KILLED_BEFORE_INSTALLING, str(request_for.cache)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (half,) = request_for.cache.glob("*/bin/python")
    assert request_for(tiny="1.0") == half
    assert seen(half, "import tiny; print(tiny.VERSION)") == "1.0"


def test_what_the_machine_lacks_is_no_fault_of_the_request(
    request_for: Requests, tmp_path: Path, monkeypatch: Patch
) -> None:
    """No interpreter, no pip, no network, a file where the cache should be."""
    with pytest.raises(Infrastructure, match="expected a Python interpreter"):
        request_for(python=tmp_path / "nowhere", tiny="1.0")
    venv.create(tmp_path / "bare", with_pip=False)
    with pytest.raises(Infrastructure, match="bare/bin/python has no pip"):
        request_for(python=tmp_path / "bare" / "bin" / "python", tiny="1.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens on it
        port = taken.getsockname()[1]
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(Infrastructure, match="the index cannot be reached"):
            request_for(tiny="1.0")
    shutil.rmtree(request_for.cache)
    request_for.cache.write_text("")
    with pytest.raises(Infrastructure, match="cannot write to the cache"):
        request_for(tiny="1.0")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", Infrastructure, "disk is"),
        ("ERROR: something new\n", Infrastructure, "failed: something new"),
        ("", Infrastructure, "failed: no output"),
        (
            "WARNING: x\nERROR: No matching distribution found for b==1",
            UsageError,
            "release .* b==1",
        ),
        (
            "ERROR: Cannot install a and b because these package versions have conflicting"
            " dependencies.\n\nThe conflict is caused by:\n    a 1 depends on c==1\n"
            "    b 1 depends on c==2\n\nTo fix this you could try\n",
            UsageError,
            "no releases fit each other: a 1 depends on c==1; b 1 depends on c==2",
        ),
    ],
)
def test_failures_of_pip_are_one_line(
    request_for: Requests, tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    """The machine's or the user's, with pip's own reason."""
    with pytest.raises(kind, match=message) as raised:
        request_for(python=interpreter(tmp_path, pip_says=text), tiny="1.0")
    assert "\n" not in str(raised.value)


def test_releases_are_in_order_of_version(index: Path) -> None:
    """Both ends are included, 1.10 comes after 1.2; pre-releases only where one is asked for."""
    assert releases("tiny", "1.0", "1.10", BASE) == ["1.0", "1.1", "1.10"]
    assert releases("tiny", "1.1.0", "1.2rc1", BASE) == ["1.1", "1.2rc1"]
    for asked, words in (
        (("tiny", "1.0", "1.5"), r"got tiny==1\.5; some legal values: 1\.0, 1\.1, 1\.10"),
        (("tiny", "1.10", "1.0"), r"expected 1\.10 to be older than 1\.0"),
        (("nowhere", "1.0", "1.1"), "expected a release .* nowhere"),
    ):
        with pytest.raises(UsageError, match=words):
            releases(*asked, BASE)

"""Run PyTorch's own FSDP2 tests against torch's and our `fully_shard`, and print a table of both.

    python -m tests.torch_fsdp2 FOLDER [--engine torch|ours] [-k TEXT] [--all]
        [--results FILE]

FOLDER holds files of `test/distributed/_composable/fsdp`. They run on CPU ranks over gloo, each
test in processes of its own. A test counts if torch passes it here, it wraps a module and it names
nothing private; `--all` runs the private ones, too. Exit codes: 0, 1 a counted test fails with
ours, 2 no test ran, 4 usage.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.torch_fsdp2.adapt import Test, calls, collect, load, use_cpu, use_ours

MAX_RANKS = 4
ENGINES = ("torch", "ours")
NOT_RUN = "not run"
BEYOND = {
    "test_2d_mesh_without_mesh_dim_names", "test_raise_noncontiguous_parameter",
    "test_raise_scalar_parameter",
}  # fmt: skip
"""They ask for refusals of what ours trains, as `tests/dist/test_fsdp_parity.py` shows."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_fsdp2", exit_on_error=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help="default: both")
    parser.add_argument("-k", default="", help="only tests whose name has this text")
    parser.add_argument("--all", action="store_true", help="also tests of torch's private names")
    parser.add_argument("--timeout-s", type=float, default=90.0, help="of one test")
    parser.add_argument("--results", type=Path, help="a JSON file to read and to add results to")
    try:
        asked = parser.parse_args(arguments)
    except argparse.ArgumentError as wrong:
        sys.stderr.write(f"{wrong}\n")
        return 4
    use_cpu(MAX_RANKS)
    files = sorted(asked.folder.glob("test_*.py"))
    tests = [test for file in files for test in collect(file) if asked.k in test.name]
    tests = [test for test in tests if asked.all or not test.private]
    results: dict[str, dict[str, str]] = {}
    if asked.results and asked.results.exists():
        results = json.loads(asked.results.read_text())
    for test in tests:
        for engine in ENGINES if asked.engine is None else (asked.engine,):
            error = _run(test, engine, asked.timeout_s)
            sys.stderr.write(f"{test.name}  {engine}: {error or 'pass'}\n")
            results.setdefault(test.name, {})[engine] = error
            if asked.results:
                asked.results.write_text(json.dumps(results, indent=1, sort_keys=True))
    return _report(tests, results)


def _report(tests: list[Test], results: dict[str, dict[str, str]]) -> int:
    """Print the table and the counts; the exit code."""
    sys.stdout.write(
        f"| test | {' | '.join(ENGINES)} | private names | first line of the error |\n"
    )
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    passed, counted = dict.fromkeys(ENGINES, 0), []
    for test in tests:
        errors = results.get(test.name, {})
        words = {engine: _word(errors.get(engine, NOT_RUN)) for engine in ENGINES}
        for engine in ENGINES:
            passed[engine] += words[engine] == "pass"
        if words["torch"] == "pass" and words["ours"] != NOT_RUN and not test.private:
            counted.append(words["ours"] == "pass")
        error = _first_line(errors.get("ours") or errors.get("torch") or "")[:160]
        cells = test.name, *words.values(), ", ".join(test.private[:3]), error
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
    ran = sum(bool(results.get(test.name)) for test in tests)
    share = f" ({sum(counted) / len(counted):.0%})" if counted else ""
    more = sum(test.method in BEYOND and bool(results.get(test.name)) for test in tests)
    share += f", and {more} fail only as ours trains what they want refused" if more else ""
    sys.stdout.write(
        f"\n{len(tests)} tests, {ran} ran; torch passes {passed['torch']}, ours {passed['ours']}.\n"
        f"Torch passes and nothing private: {len(counted)}; of these ours {sum(counted)}{share}.\n"
    )
    return int(not all(counted)) if ran else 2


def _word(error: str) -> str:
    if error == NOT_RUN or error.startswith("skipped"):
        return error.split(":")[0]
    return "FAIL" if error else "pass"


def _first_line(error: str) -> str:
    """The exception's own first line, not the traceback's."""
    lines = [line for line in error.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith((" ", "Traceback"))]
    return (own or lines or [""])[0].strip()


def _run(test: Test, engine: str, timeout_s: float) -> str:
    """Run one test on its ranks: an empty text if all passed, else the first failure."""
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), test.ranks(MAX_RANKS)
        reports = [folder / f"{rank}.txt" for rank in range(ranks)]
        left = {_fork(test, engine, rank, ranks, folder) for rank in range(ranks)}
        deadline = time.monotonic() + timeout_s
        while left and time.monotonic() < deadline:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            if any(report.exists() and report.read_text() for report in reports):
                # The others wait for it in a collective: a moment for reports of their own.
                deadline = min(deadline, time.monotonic() + 2.0)
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        texts = [report.read_text() if report.exists() else None for report in reports]
    # A rank that another's failure has cut off says less than the one that failed first.
    said = sorted((t for t in texts if t), key=lambda t: " by peer" in t)
    if not said and None in texts:
        return f"no report of rank {texts.index(None)} within {timeout_s:g} s"
    return said[0] if said else ""


def _fork(test: Test, engine: str, rank: int, ranks: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        text = _run_on_rank(test, engine, rank)
    except unittest.SkipTest as reason:
        text = f"skipped: {reason}"
    except BaseException:  # noqa: BLE001
        text = traceback.format_exc(chain=False)
    part = folder / f"{rank}.part"
    part.write_text(text)
    part.rename(folder / f"{rank}.txt")
    os._exit(0)


def _run_on_rank(test: Test, engine: str, rank: int) -> str:
    torch.set_num_threads(1)
    if engine == "ours":
        use_ours()
    made = getattr(load(test.file), test.case)
    made.rank, made.world_size = rank, dist.get_world_size()
    case = made(test.method)
    torch.manual_seed(1234)
    case.setUp()
    case.perThreadSetUp()
    getattr(case, test.method)()
    dist.barrier()
    return "" if calls else "passes, but wraps nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

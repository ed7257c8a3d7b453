"""A port that is taken at the first attempt only: made again by the real engine, and told so."""

import errno
from pathlib import Path
from typing import Any

from harness.checks import judge
from harness.engine.local import LocalEngine
from harness.records import RunSpec
from harness.runner.run import View, earlier_attempts, execute
from harness.store import RunFolder
from reports.reading import summarise
from tests.planted import stub_ranks
from tests.support import records

ENTRY = "tests.planted.test_retried:rank_main"
CANDIDATE = 1
"""Its seed."""


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """As a stub rank, but in the candidate's first attempt, where rank 1 finds its port taken."""
    first = not folder.with_name(f"{folder.name}.attempt0").exists()
    if not (spec.config["seed"] == CANDIDATE and first):
        return stub_ranks.rank_main(spec, folder, rank, store_port)
    stream = stub_ranks.Stream(folder, rank)
    stream.write(stub_ranks.start_record(spec, rank))
    told = "The server socket has failed to listen on any local network address. port: 29500, "
    told += f"code: -98, name: {errno.errorcode[errno.EADDRINUSE]}, message: address already in use"
    about: dict[str, Any] = {"message": told} if rank == 1 else {"message": "refused", "blames": 1}
    stream.write(records.error(rank, step=-1, type="DistNetworkError", **about))
    return 1


def run(seed: int, replica: int = 0) -> RunSpec:
    config = {"steps": 1, "microbatches": 1, "seed": seed, "parallel": {"dp": 2}}
    return RunSpec(config=config, device="cpu", world_size=2, timeout_s=60.0, replica=replica)


def test_a_plant_of_the_first_attempt_is_passed_on_attempt_two(tmp_path: Path) -> None:
    """Real ranks fail once for the machine's sake; the case passes, and every attempt is kept."""
    case = records.case_spec("case", run(0), run(0, 1), run(CANDIDATE), checks={"loss": {}})
    folder = RunFolder.create(tmp_path / "out", {}, "", [case])
    with LocalEngine(2, entry=ENTRY) as engine:
        (verdict,) = execute(folder, [case], engine, View(), retries=1, judge=judge)
    folder.release()
    assert verdict.outcome == "passed", verdict.message
    (attempt,) = earlier_attempts(folder, case.candidate)
    assert (attempt.what, attempt.signature) == ("crashed", "port_in_use")
    final = folder.finished(case.candidate.key)
    assert final is not None
    assert (final.what, final.attempt) == ("", 1)
    (told,) = summarise(folder.path).cases
    assert told.attempt_words == "passed on attempt 2 (candidate: port_in_use)"

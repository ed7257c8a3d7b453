"""What somebody does who knows the checksums: files that say something else and are whole.

Who makes every checksum fit, from a record up to its verdict, makes a pass: only judging again can
tell (`harness check`, `merge`). Each kind here leaves a file that says otherwise.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.store.files import checksum_of
from tests.damaged_folders.kinds import CASE, FILES, Damage, lines_of, run_of
from tests.damaged_folders.rewrite import rewrite


def sealed_again(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """Change the records of a rank, and their checksum in the outcome of the run with them."""
    plain = [json.loads(line) for line in lines_of(path)]
    change(plain)
    lines = [json.dumps(values, sort_keys=True, separators=(",", ":")) for values in plain]
    path.unlink()
    path.write_text("\n".join(lines) + "\n")
    outcome = path.with_name("outcome.json")
    files = json.loads(outcome.read_bytes())["files"]
    rewrite(outcome, {"files": files | {path.name: checksum_of(path)}})
    return path


def in_records(change: Callable[[list[dict[str, Any]]], None]) -> Damage:
    return lambda folder, rng: sealed_again(FILES["candidate"](folder), change)


def in_object(name: str, **changes: Any) -> Damage:
    def damage(folder: Path, rng: random.Random) -> Path:
        path = FILES[name](folder)
        rewrite(path, changes)
        return path

    return damage


def _step(**changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda plain: plain[3].update(changes)


def _cut(plain: list[dict[str, Any]]) -> None:
    del plain[2]


def _cut_and_counted(plain: list[dict[str, Any]]) -> None:
    del plain[4]
    plain[-1]["steps"] = 3


def _as_rank_0(plain: list[dict[str, Any]]) -> None:
    for values in plain:
        values["rank"] = 0


def _reordered(plain: list[dict[str, Any]]) -> None:
    plain[2], plain[3] = plain[3], plain[2]


def _plan(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the case in the plan, and the checksums of plan and manifest."""
    path = folder / "cases.json"
    plain = json.loads(path.read_bytes())
    change(next(case for case in plain["cases"] if case["id"] == CASE))
    path.write_text(json.dumps(plain))
    manifest = folder / "manifest.json"
    files = json.loads(manifest.read_bytes())["files"]
    files["cases.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(manifest, {"files": files})
    return path


def in_plan(**changes: Any) -> Damage:
    return lambda folder, rng: _plan(folder, lambda case: case.update(changes))


def _world(size: int) -> Damage:
    def change(case: dict[str, Any]) -> None:
        case["candidate"]["world_size"] = size

    return lambda folder, rng: _plan(folder, change)


ENDED_WELL = {
    "what": "", "message": "", "culprit_rank": None,
    "ranks": [{"rank": r, "code": 0, "killed_by_harness": False} for r in range(2)],
}  # fmt: skip

IN_PASSED: dict[str, Damage] = {
    "step_cut": in_records(_cut),
    "last_step_cut": in_records(_cut_and_counted),
    "reordered": in_records(_reordered),
    "other_rank": in_records(_as_rank_0),
    "other_run": in_records(lambda plain: plain[0].update(run="w2-eager-r0-000000000000")),
    "other_schema": in_records(lambda plain: plain[0].update(schema=2)),
    "smaller_world": in_records(lambda plain: plain[0].update(world_size=1)),
    "loss_differs": in_records(_step(loss={"bits": "40000001", "value": 2.000000238418579})),
    "nan_told": in_records(_step(nonfinite={"grads": ["w"]})),
    "nan_in_loss": in_records(_step(loss={"bits": "7fc00000", "value": None})),
    "more_memory": in_records(lambda plain: plain[-1].update(peak_bytes=1 << 40)),
    "no_replays": in_records(lambda plain: plain[-1].update(replays=0)),
    "no_tensors": in_records(lambda plain: plain[0]["tensors"].update(weights=[])),
    "other_environment": in_records(lambda plain: plain[0].update(environment={"fingerprint": {}})),
    "error_too": in_records(
        lambda plain: plain.insert(
            4, {"kind": "error", "rank": 1, "step": 2, "what": "crashed", "type": "E",
                "message": "m", "traceback": "", "blames": None},
        )
    ),
    "outcome_crashed": in_object("outcome", what="crashed", message="it says so"),
    "outcome_code": in_object("outcome", ranks=[{"rank": 0, "code": 1}, {"rank": 1, "code": 0}]),
    "outcome_twice": in_object("outcome", ranks=ENDED_WELL["ranks"][:1] * 2),  # type: ignore[index]
    "outcome_other_key": in_object("outcome", key="w2-eager-r0-000000000000"),
    "manifest_newer": in_object("manifest", schema=99),
    "manifest_bool": in_object("manifest", schema=True),
    "world_of_a_billion": _world(10**9),
    "world_of_one": _world(1),
    "unsafe_id": in_plan(id="../../../etc"),
    "skipped_in_plan": in_plan(skip_reason="not today"),
    "no_checks": in_plan(checks={}),
    "unknown_check": in_plan(checks={"vibes": {}}),
    "reference_itself": lambda folder, rng: _plan(
        folder, lambda case: case.update(candidate=case["reference"])
    ),
    "outcome_removed_verdict_kept": lambda folder, rng: _removed(
        run_of(folder, "candidate") / "outcome.json"
    ),
}  # fmt: skip

FORGED = {"outcome": "passed", "what": "", "message": "every check said yes", "difference": None}
IN_CRASHED: dict[str, Damage] = {
    "outcome_forged": in_object("outcome", **ENDED_WELL),
    "both_forged": lambda folder, rng: [
        in_object("outcome", **ENDED_WELL)(folder, rng), in_object("verdict", **FORGED)(folder, rng)
    ][1],
}  # fmt: skip
IN_NAN: dict[str, Damage] = {
    "nan_not_told": lambda folder, rng: [
        sealed_again(run_of(folder, "candidate") / f"rank{rank}.jsonl", _step(nonfinite={}))
        for rank in range(2)
    ][1],
    "nan_replaced": lambda folder, rng: _hide_nan(folder, ranks=(1,)),
}

HARMLESS: dict[str, Damage] = {
    "future_mtime": lambda folder, rng: _dated(FILES["candidate"](folder), 32503680000),
    "past_mtime": lambda folder, rng: _dated(FILES["verdict"](folder), 1),
    "stderr_gone": lambda folder, rng: _written(
        run_of(folder, "candidate") / "rank0.stderr", b"\xff"
    ),
    "note_beside": lambda folder, rng: _written(folder / "notes.txt", b"mine"),
    "lock_left": lambda folder, rng: _written(folder / "lock", b"process 1 on elsewhere\n"),
    "half_written": lambda folder, rng: _written(folder / ".manifest.json.77.tmp", b"{"),
    "created_in_the_future": in_object("manifest", created="9999-12-31T23:59:59+00:00"),
    "created_nonsense": in_object("manifest", created="\x00\ud800 tomorrow"),
    "ended_in_the_future": in_object("outcome", started_unix_s=1e300, wall_s=1e18),
    "ended_before_time": in_object("outcome", started_unix_s=-1e300, wall_s=-5.0),
    "attempt_is_a_file": lambda folder, rng: _written(
        run_of(folder, "candidate").with_name(run_of(folder, "candidate").name + ".attempt0"), b""
    ),
}


def _hide_nan(folder: Path, ranks: tuple[int, ...]) -> Path:
    """The loss of the reference in place of the NaN, on some ranks."""
    good = {"bits": "40000000", "value": 2.0}
    paths = [
        sealed_again(
            run_of(folder, "candidate") / f"rank{rank}.jsonl", _step(loss=good, nonfinite={})
        )
        for rank in ranks
    ]
    return paths[-1]


def _removed(path: Path) -> Path:
    path.unlink()
    return path


def _dated(path: Path, unix_s: int) -> Path:
    os.utime(path, (unix_s, unix_s))
    return path


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path

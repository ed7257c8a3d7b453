"""Floods, secrets, clocks."""

import json
import resource
from pathlib import Path
from urllib.parse import quote

from tests.rough_machine.harness_process import run, scenario
from tests.rough_machine.ranks import (
    DATABASE_URL,
    FAIL_SEED,
    FLOOD_BYTES,
    FLOOD_SEED,
    FOUND,
    SECRET_SEED,
    SECRETS,
)

MAX_OUTPUT_BYTES = (64 << 20) + (1 << 20)
MAX_RESIDENT_KIB = 512 << 10


def flood(folder: Path) -> list[str]:
    """A rank that prints a GiB fills no disk and no memory; head and end are kept."""
    path = scenario(folder, seeds=[FLOOD_SEED])
    code, out, err = run("run", str(path), "--out", "run", "--no-history", cwd=folder)
    wrong = [f"exit code {code}: {(out + err)[-300:]}"] if code else []
    for output in folder.glob("run/runs/*/rank0.stderr"):
        text = output.read_bytes()
        if len(text) > MAX_OUTPUT_BYTES or not text.endswith(b"the last words\n"):
            wrong.append(f"{output.parent.name}: {len(text)} bytes of {FLOOD_BYTES}")
    resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if resident > MAX_RESIDENT_KIB:
        wrong.append(f"a process held {resident >> 10} MiB")
    return wrong


def secrets(folder: Path) -> list[str]:
    """No byte that is written or printed holds a secret of variables, output, scenario or words."""
    token = SECRETS["DEPLOY_TOKEN"]
    environ = SECRETS | {"DATABASE_URL": DATABASE_URL, "NCCL_DEBUG_FILE": f"/x/{token}"}
    path = scenario(folder, seeds=[SECRET_SEED, FAIL_SEED])
    place = folder / "scenarios"
    place.mkdir()
    told = path.read_text().replace("not as it should", f"not as {token} should, {FOUND['github']}")
    (place / "rough.yaml").write_text(told)
    path.unlink()
    said, wrong = {}, []
    for number, (expected, args) in enumerate((
        (1, ("run", str(place / "rough.yaml"), "--out", "run", "-k", f"attn or {token}")),
        (1, ("run", "--resume", "run")),
        (0, ("report", "run")),
        (1, ("check", "run", "--json")),
        (0, ("show", f"dp2-seed{FAIL_SEED}-attn", "run")),
        (0, ("history", "--history", "history.sqlite")),
        (1, ("rerun", f"dp2-seed{FAIL_SEED}-attn", "run", "--out", "again")),
        (4, ("run", str(place / "rough.yaml"), "--set", f"model.preset={token}")),
        (4, ("run", f"{token}.yaml")),
        (4, ("show", token, "run")),
    )):  # fmt: skip
        code, out, err = run(*args, cwd=folder, env=environ)
        said[f"{number} {args[0]}"] = (out + err).encode()
        if code != expected:
            wrong.append(f"{args[0]}: exit code {code}: {(out + err)[-300:]}")
    files = [each for each in folder.rglob("*") if each.is_file() and place not in each.parents]
    places = said | {str(each.relative_to(folder)): each.read_bytes() for each in files}
    for name, value in (SECRETS | FOUND).items():
        forms = {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value)}
        found = [at for at, data in places.items() if any(form.encode() in data for form in forms)]
        if found:
            wrong.append(f"{name} is in {found}")
    if not [at for at, data in places.items() if b"connecting with ***" in data]:
        wrong.append("nothing was masked: the ranks told no secret")
    if "history.sqlite" not in places:
        wrong.append(f"no history among {sorted(places)}")
    return wrong


def clocks(folder: Path) -> list[str]:
    """Clocks that jump by days at every look change no verdict and no limit."""
    code, out, err = run(
        "run", str(scenario(folder)), "--out", "run", "--no-history",
        cwd=folder, env={"JUMPING_CLOCK": "1"},
    )  # fmt: skip
    return [f"exit code {code}: {(out + err)[-400:]}"] if code or "Traceback" in err else []

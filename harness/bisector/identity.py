"""What the answers of a search hold for: old ones are never mixed with those of anything else.

code          commit of the packages, or a hash of their files where git does not know them
environment   packages, driver, variables, hardware, processor, device, tokens of the case
case          its id
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import commit
from harness.bisector.environment import KINDS, Kind, facts_of_manifest
from harness.bisector.worktree import Git
from harness.codec import Json, dumps
from harness.errors import UsageError
from harness.history.trend import different, told
from harness.machine import Machine, installed_packages
from harness.manifest import stored_environment
from harness.program.spec import ProgramSpec, program_of
from harness.records import CaseSpec

MOST_TOLD = 3
_PROCESSOR = Path("/proc/cpuinfo")
_WORDS: dict[Kind, str] = {"packages": "package ", "variables": "variable "}
"""What stands before a name that says nothing by itself."""


@dataclass(frozen=True, kw_only=True)
class Identity(Json):
    """What answers hold for: a journal of something else is refused.

    Attributes:
        code: of the program, or the range that is searched.
        environment: name to value of whatever else decides bits.
        case: id or key of the case.
    """

    code: str
    environment: dict[str, str]
    case: str

    def differs_from(self, other: "Identity") -> str:
        """What became of these answers' code, environment and case; "" if all is the same."""
        ours, theirs = self._flat(), other._flat()
        names = different(ours, theirs)
        words = [f"{n} {told(ours, n)} became {told(theirs, n)}" for n in names[:MOST_TOLD]]
        if len(names) > MOST_TOLD:
            words.append(f"{len(names) - MOST_TOLD} more")
        return "; ".join(words)

    def _flat(self) -> dict[str, str]:
        return {"case": self.case, "code": self.code or "unknown", **self.environment}


def identity_of(case: CaseSpec, here: Machine, environ: Mapping[str, str] = os.environ) -> Identity:
    """What answers that are found now, on this machine, hold for."""
    facts = facts_of_manifest(
        {
            "machine": json.loads(dumps(here)),  # lists, as a manifest has them
            "packages": installed_packages(),
            "environment": {"variables": stored_environment(environ)},
        }
    )
    found = {
        f"{_WORDS.get(kind, '')}{name}": str(value)
        for kind in KINDS
        for name, value in facts.get(kind, {}).items()
    }
    return Identity(
        code=commit.describe() or _files(),
        environment={
            "device": case.candidate.device, **found, "processor": processor(), **_tokens(case),
            **program_code(case.candidate.config),
        },
        case=case.id,
    )  # fmt: skip


def processor(described: Path = _PROCESSOR) -> str:
    """The model of the CPU and a hash of what it can do: kernels are chosen by that."""
    try:
        text = described.read_text(errors="replace").strip().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in text.splitlines())
    known = {name.strip(): value.strip() for name, _, value in lines}
    features = " ".join(sorted((known.get("flags") or known.get("Features") or "").split()))
    model = known.get("model name") or known.get("CPU part") or platform.machine()
    return f"{model} {hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _tokens(case: CaseSpec) -> dict[str, str]:
    """The file that a case reads, if it does: its size and the time of its last change."""
    data = case.candidate.config.get("data")
    path = data.get("path") if isinstance(data, Mapping) else None
    if not path:
        return {}
    try:
        facts = Path(str(path)).stat()
    except OSError as error:
        return {"tokens": f"{path}: {error.strerror}"}
    return {"tokens": f"{path}: {facts.st_size} bytes of {facts.st_mtime_ns}"}


def program_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Of somebody's program a hash of its script, of the files beside it and of its repository."""
    if (program := program_of(config)) is None:
        return {}
    digest, folder = hashlib.sha256(), folder_of(program)
    for path in sorted(folder.glob("*.py")):
        with suppress(OSError):
            digest.update(path.name.encode() + path.read_bytes())
    with suppress(UsageError):
        git = Git(folder)
        digest.update((git("rev-parse", "HEAD") + git("diff", "HEAD")).encode())
    return {"program": f"files {digest.hexdigest()[:16]}"}


def folder_of(program: ProgramSpec) -> Path:
    """Where a program lies: its script's folder, or that in which its module is looked for."""
    return Path(program.target).parent if program.kind == "script" else Path(program.folder)


def _files() -> str:
    """A hash of the packages' files."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for package in commit.PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"files {digest.hexdigest()[:16]}"

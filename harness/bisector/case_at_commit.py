"""A case as the harness of another commit can read it, or why it cannot be run there.

a probe in the commit's own packages  ->  what it knows  ->  the case in its words

a key that the commit does not know, at its default    left out: it does what the default says
at another value                                       no verdict: it cannot do that
a key that only the commit knows                       its own default
an option of `harness rerun` that only orders work     left out
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from fsdp_core.config import TrainConfig
from harness.bisector.commit_range import LEFT_OUT, PUT_IN
from harness.bisector.differences import config_of, leaves_of
from harness.codec import Json
from harness.plant_spec import PlantSpec
from harness.records import CaseSpec, RunSpec
from harness.store import LEGS

PROBE = """\
import dataclasses, json, fsdp_core, harness, harness.cli
found = {"files": [harness.__file__, fsdp_core.__file__]}
try:
    from fsdp_core.config import TrainConfig
    found["config"] = TrainConfig().to_dict()
except Exception: pass
try:
    from harness import records
    for kind in ("CaseSpec", "RunSpec", "PlantSpec"):
        if hasattr(records, kind):
            found[kind] = [each.name for each in dataclasses.fields(getattr(records, kind))]
except Exception: pass
for place in ("harness.store.files", "harness.checksum"):
    try: __import__(place)
    except Exception: continue
    break
else: found["checksums"] = False
try:
    found["options"] = [o for p in harness.cli.rerun.params for o in p.opts]
except Exception: pass
print(json.dumps(found))
"""
"""For `python -c` with the commit's packages: one line of JSON, or an end that says why not."""

ORDER_WORK = ("--jobs", "--slots", "--no-history")
"""Options that change no verdict."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the harness of a commit knows; None where it does not say.

    Attributes:
        files: of the packages that it would run.
        config: setting to default.
        kinds: class to the names of its fields.
        options: of `harness rerun`.
        checksums: whether its files have them.
    """

    files: tuple[str, ...]
    config: dict[str, Any] | None = None
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    options: Sequence[str] | None = None
    checksums: bool = True


def read_probe(text: str) -> Known:
    """What `PROBE` printed.

    Raises:
        ValueError: something else.
    """
    plain = json.loads(text.strip().splitlines()[-1] if text.strip() else text)
    if not isinstance(plain, dict) or not isinstance(plain.get("files"), list):
        raise ValueError(f"expected an object with files, got {text!r:.80}")
    config = plain.get("config")
    return Known(
        files=tuple(map(str, plain["files"])),
        config=leaves_of(config) if isinstance(config, dict) else None,
        kinds={k: plain[k] for k in ("CaseSpec", "RunSpec", "PlantSpec") if k in plain},
        options=plain.get("options"),
        checksums=plain.get("checksums", True) is not False,
    )


@dataclass(frozen=True, kw_only=True)
class Translated:
    """A case in the words of a commit.

    Attributes:
        plain: what goes into its `case.json`.
        why_not: "", or what of the case the commit does not know.
        left_out: settings at their defaults that it does not know.
        put_in: settings that it alone knows, at its defaults.
    """

    plain: dict[str, Any]
    why_not: str = ""
    left_out: tuple[str, ...] = ()
    put_in: tuple[str, ...] = ()

    @property
    def detail(self) -> dict[str, list[str]]:
        """Of a reply: by `LEFT_OUT` and `PUT_IN`, what there is."""
        found = {LEFT_OUT: list(self.left_out), PUT_IN: list(self.put_in)}
        return {name: settings for name, settings in found.items() if settings}


def translated(case: Mapping[str, Any], known: Known) -> Translated:
    """A case, as `CaseSpec.to_json` has it, for the harness of a commit."""
    work = _Translation(known)
    plain = work.fields_of("CaseSpec", CaseSpec, case)
    for leg in LEGS:
        plain[leg] = work.fields_of("RunSpec", RunSpec, plain[leg])
        plain[leg]["config"] = work.config(plain[leg]["config"])
        if isinstance(plain[leg].get("plant"), dict):
            plain[leg]["plant"] = work.plant(plain[leg]["plant"])
    return Translated(
        plain=plain, why_not=", ".join(dict.fromkeys(work.unknown)),
        left_out=tuple(dict.fromkeys(work.left_out)), put_in=tuple(dict.fromkeys(work.put_in)),
    )  # fmt: skip


class _Translation:
    def __init__(self, known: Known) -> None:
        self._known = known
        self.unknown: list[str] = []
        self.left_out: list[str] = []
        self.put_in: list[str] = []

    def fields_of(self, name: str, kind: type[Json], plain: Mapping[str, Any]) -> dict[str, Any]:
        """An object without what the commit does not know; without what says nothing if unsure."""
        silent = {f.name: f.default for f in fields(kind) if f.default is not MISSING}  # type: ignore[arg-type] # a dataclass
        names = self._known.kinds.get(name)
        kept = {}
        for key, value in plain.items():
            says_nothing = key in silent and _same(value, silent[key])
            if names is None:
                if not says_nothing:
                    kept[key] = value
            elif key in names:
                kept[key] = value
            elif not says_nothing:
                self.unknown.append(f"{key} of a {name}")
        return kept

    def plant(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """A plant, and those beside it."""
        kept = self.fields_of("PlantSpec", PlantSpec, plain)
        if kept.get("beside"):
            kept["beside"] = [self.plant(each) for each in kept["beside"]]
        return kept

    def config(self, plain: dict[str, Any]) -> dict[str, Any]:
        """A configuration in the settings of the commit."""
        theirs = self._known.config
        if theirs is None:
            return plain
        ours, defaults = leaves_of(plain), leaves_of(TrainConfig().to_dict())
        kept = {}
        for leaf, value in ours.items():
            if leaf in theirs:
                kept[leaf] = value
            elif leaf in defaults and _same(value, defaults[leaf]):
                self.left_out.append(leaf)
            else:
                self.unknown.append(f"{leaf} = {value}")
        for leaf in sorted(theirs.keys() - ours.keys()):
            kept[leaf] = theirs[leaf]
            self.put_in.append(leaf)
        return config_of(kept)


def _same(one: Any, other: Any) -> bool:
    """As JSON has them: 1 is not true, a tuple is a list."""
    if isinstance(other, Json):
        other = other.to_json()
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)

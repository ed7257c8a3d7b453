"""Contracts of harness.bisect.commit_runs: never another case than the one in question."""

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from harness.bisect.commit_runs import PROBE, Known, read_probe, translated
from harness.bisect.differences import config_of, leaves_of
from harness.records import CaseSpec, PlantSpec, joined
from harness.store import LEGS
from tests.unit.harness.bisect.made_up_asker import case_of, run

CASE = case_of(run(), run(PlantSpec(fault="ulp", chance=0.5), graph=("attn",)))
PLAIN: dict[str, Any] = json.loads(json.dumps(CASE.to_json()))


@pytest.fixture(scope="module")
def here() -> Known:
    """What this harness says of itself."""
    with redirect_stdout(io.StringIO()) as said:
        exec(PROBE, {})
    return read_probe(said.getvalue())


def without(known: Known, leaf: str = "", **fields: str) -> Known:
    """A commit that does not know a setting, or a field of a class."""
    assert known.config is not None
    return Known(
        files=known.files,
        config={k: v for k, v in known.config.items() if k != leaf},
        kinds={
            kind: [name for name in names if fields.get(kind) != name]
            for kind, names in known.kinds.items()
        },
    )


def test_our_own_commit_reads_the_case_as_it_is(here: Known) -> None:
    """Nothing is lost, nothing is put in, nothing is said."""
    found = translated(PLAIN, here)
    assert (found.why_not, found.detail) == ("", {})
    assert CaseSpec.from_json(found.plain) == CASE


def test_a_setting_at_its_default_is_left_out(here: Known) -> None:
    """In every leg; the commit does what the default says, and the search says so."""
    found = translated(PLAIN, without(here, "fsdp.reshard_after_forward"))
    assert found.why_not == ""
    assert found.detail == {"left_out": ["fsdp.reshard_after_forward"]}
    for leg in LEGS:
        expected = leaves_of(PLAIN[leg]["config"])
        del expected["fsdp.reshard_after_forward"]
        assert leaves_of(found.plain[leg]["config"]) == expected


@pytest.mark.parametrize("leaf", ["graph", "steps", "parallel.dp"])
def test_a_setting_that_says_something_is_no_verdict(here: Known, leaf: str) -> None:
    """Without it the commit would answer another question."""
    value = leaves_of(PLAIN["candidate"]["config"])[leaf]
    assert f"{leaf} = {value}" in translated(PLAIN, without(here, leaf)).why_not


def test_a_true_is_not_a_one(here: Known) -> None:
    """Values are compared as JSON has them, not as Python does."""
    plain = json.loads(json.dumps(PLAIN))
    leaves = leaves_of(plain["candidate"]["config"]) | {"fsdp.reshard_after_forward": 1}
    plain["candidate"]["config"] = config_of(leaves)
    found = translated(plain, without(here, "fsdp.reshard_after_forward"))
    assert found.why_not == "fsdp.reshard_after_forward = 1"


def test_a_setting_of_older_commits_is_at_its_default_there(here: Known) -> None:
    """A case that has no such key would be refused as not whole."""
    assert here.config is not None
    known = Known(files=here.files, config=here.config | {"fsdp.old": 3}, kinds=here.kinds)
    found = translated(PLAIN, known)
    assert [found.plain[leg]["config"]["fsdp"]["old"] for leg in LEGS] == [3, 3, 3]
    assert found.detail == {"put_in": ["fsdp.old"]}


def test_fields_of_records_that_say_nothing_are_left_out(here: Known) -> None:
    """One at its default goes, one that decides what is run is no verdict."""
    found = translated(PLAIN, without(here, RunSpec="rounding", CaseSpec="repeats"))
    assert found.why_not == ""
    assert "rounding" not in found.plain["candidate"]
    assert "repeats" not in found.plain
    assert translated(PLAIN, without(here, RunSpec="replica")).why_not == "replica of a RunSpec"
    assert translated(PLAIN, without(here, PlantSpec="chance")).why_not == "chance of a PlantSpec"


def test_faults_beside_a_fault_are_put_into_its_words_too(here: Known) -> None:
    """Each plant of a run is a record of its own."""
    two = joined((PlantSpec(fault="ulp"), PlantSpec(fault="jitter", chance=0.5)))
    assert two is not None
    plain = json.loads(json.dumps(PLAIN))
    plain["candidate"]["plant"] = json.loads(json.dumps(two.to_json()))
    assert translated(plain, here).plain["candidate"]["plant"] == plain["candidate"]["plant"]
    found = translated(plain, without(here, PlantSpec="chance"))
    assert found.why_not == "chance of a PlantSpec"


@pytest.mark.parametrize("text", ["", "nothing", "[]", "{}", '{"files": 3}'])
def test_a_probe_that_says_something_else_is_an_error(text: str) -> None:
    """It is no verdict then, and no guess."""
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        read_probe(text)

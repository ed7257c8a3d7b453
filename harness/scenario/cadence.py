"""How often a scenario is run, and how much of it: the keys `tier` and `select`.

    tier     smoke     with every change, in seconds
             pr        before a change is merged
             nightly   once a night
             weekly    once a week: what a night has no room for
    select   all       every case
             pairwise  so many that every pair of values that some case has is covered
             changed   those that have not passed as they are now, with the code as it is now

A scenario without a tier is run by its name only.
"""

from pathlib import Path

from harness.scenario.decode import take_mapping, take_str
from harness.scenario.yaml_source import Node, Origin, parse_bytes, read_bytes

TIERS = ("smoke", "pr", "nightly", "weekly")
SELECTIONS = ("all", "pairwise", "changed")


def decode_tier(node: Node | None) -> str:
    """The tier; "" for none (`ScenarioError`: not one of them)."""
    return "" if node is None else take_str(node, "tier", legal=TIERS)


def decode_select(node: Node | None) -> str:
    """What is selected of the scenario (`ScenarioError`: nothing that there is)."""
    return "all" if node is None else take_str(node, "select", legal=SELECTIONS)


def read_tier(path: Path) -> str:
    """The tier of a scenario file, whatever else is in it; "" for none.

    Raises:
        ScenarioError: not YAML, no mapping, or a tier that there is not.
    """
    root = parse_bytes(read_bytes(path), Origin(str(path), 1))
    return decode_tier(take_mapping(root, "file").get("tier"))

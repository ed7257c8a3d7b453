"""The `plant` of a scenario: known faults, checked against the catalogue."""

from typing import Any

from fsdp_core.config import TrainConfig
from harness.errors import shown
from harness.faults.catalogue import CATALOGUE, LEGS, is_of_any_engine
from harness.faults.fault import Fault
from harness.plant_spec import PlantSpec, joined
from harness.scenario.decode import refuse, take_float, take_int, take_list, take_mapping, take_str
from harness.scenario.yaml_source import Node, Origin

LAST_RANK = -1
_FIELDS = ("fault", "step", "rank", "tensor", "legs", "chance")


def decode_plant(node: Node, full: str) -> PlantSpec | None:
    """A `plant` entry: null or `none`, a mapping, or a list of mappings: several faults at once.

    Raises:
        ScenarioError: an unknown fault, a key that the fault does not take, a bad value, a fault
            twice.
    """
    if node.value is None or node.value == "none":
        return None
    if not isinstance(node.value, tuple):
        return _decode_fault(node, full)
    faults = [_decode_fault(each, full) for each in take_list(node, full, "faults")]
    names = [fault.fault for fault in faults]
    for name in names:
        if names.count(name) > 1:
            raise refuse(node, full, "each fault once", got=f"{name} {names.count(name)} times")
    return joined(faults)


def _decode_fault(node: Node, full: str) -> PlantSpec:
    entries = take_mapping(node, full, legal=_FIELDS, required=("fault",))
    name = take_str(entries["fault"], f"{full}.fault", legal=CATALOGUE)
    takes = ("fault", *CATALOGUE[name].takes, "legs", "chance")
    # A step left out would be step 0, before any graph is captured: say it.
    due = ("step",) if "step" in takes else ()
    for key in (*entries, *due):
        if key not in takes or key not in entries:
            raise node.keys.get(key, node.origin).error(
                f"{full}.{key}",
                expected=f"what the fault {name} takes",
                got="nothing" if key in due else "a key that it does not take",
                legal=takes,
            )
    return PlantSpec(fault=name, **_values(entries, full))


def _values(entries: dict[str, Node], full: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "step" in entries:
        values["step"] = take_int(entries["step"], f"{full}.step", minimum=0)
    if "rank" in entries:
        rank = entries["rank"]
        last = rank.value in ("last", LAST_RANK)
        values["rank"] = LAST_RANK if last else take_int(rank, f"{full}.rank", minimum=0)
    if "tensor" in entries:
        values["tensor"] = take_str(entries["tensor"], f"{full}.tensor")
    if "legs" in entries:
        legs = take_list(entries["legs"], f"{full}.legs", "legs")
        names = tuple(take_str(leg, f"{full}.legs", legal=LEGS) for leg in legs)
        if len(set(names)) != len(names):
            raise refuse(entries["legs"], f"{full}.legs", "each leg once")
        values["legs"] = names
    if "chance" in entries:
        values["chance"] = take_float(entries["chance"], f"{full}.chance", above=0)
        if values["chance"] > 1:
            raise refuse(entries["chance"], f"{full}.chance", "a number > 0, at most 1")
    return values


def check_plant(plant: PlantSpec, written: Origin, steps: int, world_size: int) -> None:
    """See that every fault has a step and a rank in a run of so many.

    Raises:
        ScenarioError: it has not.
    """
    for fault in plant.each:
        if "step" in CATALOGUE[fault.fault].takes and fault.step >= steps:
            raise written.error(
                "plant.step", expected=f"a step below steps={steps}", got=shown(fault.step)
            )
        if fault.rank >= world_size:
            raise written.error(
                "plant.rank",
                expected=f"last or a rank below the world size {world_size}",
                got=shown(fault.rank),
            )


def check_has_part(fault: Fault, config: TrainConfig, role: str, written: Origin) -> None:
    """See that the run of a leg has what a fault is planted in.

    Raises:
        ScenarioError: it has not.
    """
    if fault.scopes and not set(fault.scopes) & set(config.graph):
        raise written.error(
            "plant.fault",
            expected=f"a graph scope that {fault.name} can be planted in",
            got=f"{'+'.join(config.graph) or 'eager'} in the {role}",
            legal=fault.scopes,
        )
    if config.engine != "ours" and not is_of_any_engine(fault):
        raise written.error(
            "engine",
            expected=f"ours, for {fault.name} to be planted in",
            got=f"{config.engine} in the {role}",
        )
    parallel = vars(config.parallel)
    if lacks := fault.lacks(parallel):
        held = ", ".join(f"{name} {shown(parallel[name])}" for name in fault.layout)
        raise written.error(
            "plant.fault",
            expected=f"a layout with {lacks}, for {fault.name} to be planted in",
            got=f"{held} in the {role}",
        )

"""Contracts of harness.records."""

from harness.records import PlantSpec, RunSpec, each_of, joined

ULP = PlantSpec(fault="ulp", step=3, rank=1)
HANG = PlantSpec(fault="hang", step=4, chance=0.3)


def spec_with(plant: PlantSpec | None) -> RunSpec:
    """A run with a plant."""
    return RunSpec(config={}, device="cpu", world_size=2, timeout_s=1, plant=plant)


def test_taking_apart_and_putting_together_are_inverse() -> None:
    """`joined` of `each` is the plant itself, whatever number of faults it has."""
    for faults in ((), (ULP,), (ULP, HANG)):
        plant = joined(faults)
        assert each_of(plant) == faults
        assert joined(each_of(plant)) == plant
    assert joined([]) is None
    assert joined([PlantSpec(fault="a", beside=(ULP,)), HANG]) == PlantSpec(
        fault="a", beside=(ULP, HANG)
    )


def test_specifications_come_back_whole() -> None:
    """Faults beside others and their chances survive JSON."""
    for plant in (None, ULP, HANG, joined([ULP, HANG]), joined([HANG, ULP])):
        spec = spec_with(plant)
        assert RunSpec.from_json(spec.to_json()) == spec
        assert RunSpec.from_json(spec.to_json()).key == spec.key


def test_keys_tell_faults_and_chances_apart() -> None:
    """Runs with other faults, or other chances, are other runs."""
    sure = PlantSpec(fault="hang", step=4)
    plants = [None, ULP, sure, HANG, joined([ULP, HANG]), joined([ULP, sure]), joined([HANG, ULP])]
    assert len({spec_with(plant).key for plant in plants}) == len(plants)

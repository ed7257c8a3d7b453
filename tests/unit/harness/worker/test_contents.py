"""A rank writes down what it is asked to keep: the bits that its records have the digests of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fsdp_core.graph.digest import digest_hex, digest_tensors, empty_rows
from harness.bisect.elements import compare
from harness.records import ErrorRecord, KeepSpec, PlantSpec, RunSpec, StartRecord, StepRecord
from harness.store.contents import Contents, Loaded, read_contents

Spec = Callable[..., RunSpec]
GROUPS = ("grads", "weights", "optim")
NAME = "layers.1.attn.attention.wk.weight"


def keeping(spec: RunSpec, *names: str, step: int = 3, **options: Any) -> RunSpec:
    """The run, which keeps something."""
    return dataclasses.replace(spec, keep=KeepSpec(step=step, names=names, **options))


def kept(rank: Any, spec: RunSpec) -> Contents:
    """What the latest run of this rank has kept."""
    latest = max(rank.folder.iterdir(), key=lambda folder: int(folder.name))
    return read_contents(latest, spec)


def tensor_of(loaded: Loaded) -> torch.Tensor:
    """As torch has it."""
    flat = torch.frombuffer(bytearray(loaded.data), dtype=getattr(torch, loaded.about.dtype))
    return flat.view(loaded.about.shape)


def test_contents_have_the_digests_of_their_step(rank: Any, spec: Spec) -> None:
    """Every tensor of every group, kept at step 3, digests to what the record of step 3 says."""
    run = keeping(spec(graph=("full_iteration",)), "grads:*", "weights:*", "optim:*")
    start, *records = rank.run(run)
    assert isinstance(start, StartRecord)
    step = next(r for r in records if isinstance(r, StepRecord) and r.step == 3)
    found = kept(rank, run)
    assert found.problems == ()
    assert list(found.names) == [
        f"{group}:{name}" for group in GROUPS for name in start.tensors[group]
    ]
    rows = empty_rows(len(found.ranks[0]), "cpu")
    digest_tensors([tensor_of(each) for each in found.ranks[0]], rows)
    digests = "".join(step.digests[group] for group in GROUPS)
    assert digest_hex(rows)[0] == digests
    assert all(each.about.as_digested for each in found.ranks[0])


def test_a_changed_element_is_found_with_its_bits(rank: Any, spec: Spec) -> None:
    """One weight moved by one ulp after step 3: that element, its index, and both patterns."""
    plain = keeping(spec(), "weights:*", "rng:*")
    faulty = dataclasses.replace(plain, plant=PlantSpec(fault="ulp", step=3, tensor=NAME))
    legs = []
    for run in (plain, faulty):
        rank.run(run)
        legs.append(kept(rank, run))
    reference, candidate = legs
    found = compare(reference, candidate, f"weights:{NAME}")
    element = found.element
    assert element is not None
    assert (found.tensor, found.rank, element.index, element.ulps) == (NAME, 0, (0, 0), 1)
    assert (element.num_different, element.numel) == (1, 8 * 16)
    assert int(element.candidate_bits, 16) == int(element.reference_bits, 16) + 1
    assert float(element.reference) != float(element.candidate)
    others = [name for name in legs[0].names if name != f"weights:{NAME}"]
    assert "rng:cpu" in others
    assert all(
        "did not come back" in compare(reference, candidate, name).message for name in others
    )


def test_what_is_kept_changes_no_bit(rank: Any, spec: Spec) -> None:
    """Records of a run that keeps are those of one that does not, but for times and memory."""
    taps = ("layers.*.attn:output", "layers.*:gradient")
    seen = []
    for run in (spec(taps=taps), keeping(spec(taps=taps), "grads:*", "layers.1.attn:output[1]")):
        steps = [r for r in rank.run(run) if isinstance(r, StepRecord)]
        seen.append([(s.loss, s.grad_norm, s.digests, s.taps) for s in steps])
    assert len(seen[0]) == 5
    assert seen[0] == seen[1]


def test_more_than_there_is_room_for_is_an_error(rank: Any, spec: Spec) -> None:
    """Copies beyond the cap end the rank with a sentence that says how many bytes there were."""
    records = rank.run(keeping(spec(), "grads:*", max_bytes=1000))
    (error,) = [record for record in records if isinstance(record, ErrorRecord)]
    assert "Expected copies of at most 1000 bytes on a rank, got" in error.message
    assert rank.code == 1


def test_a_step_that_never_came_is_said(rank: Any, spec: Spec) -> None:
    """A run that ends before the step has kept nothing, and the reader says so."""
    run = keeping(spec(), "grads:*", step=9)
    rank.run(run)
    assert kept(rank, run).problems == ("rank 0 kept nothing: it did not end step 9",)

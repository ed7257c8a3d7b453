"""Writes down the contents of the tensors that a run is asked to keep, at the end of their step."""

from collections.abc import Iterator
from pathlib import Path

import torch

from fsdp_core.train import Trainer
from fsdp_core.train.keeping import Kept, fits
from harness.records import RunSpec
from harness.store.contents import KeptTensor, Place, write_contents


class ContentsFile:
    """One rank's kept contents; does nothing where the run keeps none.

    Made before the first step: copies have their memory before anything is captured.

    Raises:
        ValueError: more bytes than the run allows.
    """

    def __init__(self, spec: RunSpec, rank: int, folder: Path, trainer: Trainer) -> None:
        self._spec, self._rank, self._folder, self._trainer = spec, rank, folder, trainer
        keep = spec.keep
        self._keeping = None if keep is None else trainer.keep(keep.names, keep.max_bytes)

    def observe(self, step: int) -> None:
        """Write the file if `step`, which has been issued, is the one to keep."""
        keep = self._spec.keep
        if keep is None or self._keeping is None or step != keep.step:
            return
        trainer = self._trainer
        with trainer.device.on(trainer.stream):
            kept = [*self._keeping.read(trainer.outputs), *self._random_states(keep.names)]
        write_contents(
            self._folder, self._spec.key, self._rank, step, [entry_of(each) for each in kept]
        )

    def _random_states(self, names: tuple[str, ...]) -> Iterator[Kept]:
        for name, state in self._trainer.rng_states().items():
            if fits(names, f"rng:{name}"):
                # Records have it from this very function, as a digest of the same bytes.
                yield Kept(f"rng:{name}", 0, state, (), as_digested=True)


def entry_of(kept: Kept) -> tuple[KeptTensor, bytes]:
    """A kept tensor as a rank's file has it, and its bytes."""
    tensor = kept.tensor
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    about = KeptTensor(
        name=kept.name, part=kept.part, dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape), as_digested=kept.as_digested,
        places=tuple(
            Place(
                name=p.name, shape=p.shape, offsets=p.offsets, local_offsets=p.local_offsets,
                sizes=p.sizes,
            )
            for p in kept.places
        ),
    )  # fmt: skip
    return about, data

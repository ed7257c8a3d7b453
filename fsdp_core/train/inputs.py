"""What a rank has of the microbatches of a step.

    rows     each sequence has `seq` tokens, cut over cp; tensors are static, plans made once
    packs    with dynamic_cp: documents of many lengths, packed; each microbatch is cut over as many
             ranks as its longest document needs, so only its number of local tokens is constant

Ranks of dp and dp_outer have sequences of their own, ranks of cp their chunks of the same ones,
ranks of tp, pp, ep and etp what their dense coordinates say.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.data import MAX_DOCUMENTS, Batches, PackedDocuments, token_source
from fsdp_core.device import Device
from fsdp_core.layouts import groups
from fsdp_core.model.batch import (
    Capacity,
    Document,
    LocalTokens,
    PackedBatch,
    Part,
    loss_weight,
    pack,
    packed_part,
    padding_multiple,
)
from fsdp_core.parallel.context import DynamicContext, dense_plan, split
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.pipeline import Microbatch

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Inputs(Protocol):
    """A rank's microbatches.

    Attributes:
        checksum: of the token source.
        shape: rows and tokens of a microbatch on this rank, before sequence parallel cuts them.
        tokens, targets: int64 [microbatches, *shape], what this rank reads in the step.
    """

    checksum: str
    shape: tuple[int, int]
    tokens: torch.Tensor
    targets: torch.Tensor

    def fill(self, step: int) -> None:
        """Take the data of a step."""

    def microbatches(self) -> list[Microbatch]:
        """Those of the step that was filled in; collective where tokens are counted."""

    def smaller(self, microbatches: int, rows: int) -> list[Microbatch]:
        """The first ones of the step that was filled in, and of each the first rows.

        Raises:
            ValueError: more than there are, or none; microbatches without rows.
        """

    def samples(self) -> dict[int, Part]:
        """For each context size that a microbatch may have, a part like those to come."""

    def named_tensors(self) -> NamedTensors:
        """Long-lived tensors, by name."""


def make_inputs(config: TrainConfig, axes: Axes, device: Device) -> Inputs:
    """The inputs that a configuration asks for. Collective."""
    kind = PackInputs if config.parallel.dynamic_cp else RowInputs
    return kind(config, axes, device)


class RowInputs:
    """Rows of one sequence each, all of whose tokens count."""

    def __init__(self, config: TrainConfig, axes: Axes, device: Device) -> None:
        seq, cp = config.model.seq, axes.cp
        self._cp, self._device = cp, device
        self._batches = Batches(
            token_source(config.data, config.model.vocab_size), config.seed,
            axes.dp_outer.rank * axes.dp.size + axes.dp.rank,
            config.microbatches, config.micro_batch_size, seq,
        )  # fmt: skip
        self.checksum = self._batches.source.checksum
        self.shape = (config.micro_batch_size, seq // cp.size)
        whole = (config.microbatches, *self.shape)
        self.tokens = torch.zeros(whole, dtype=torch.int64, device=device.torch_device)
        self.targets = torch.zeros_like(self.tokens)
        self._plan = dense_plan(seq, cp.size, cp.rank, device.torch_device)
        self._microbatches = self._first(config.microbatches, config.micro_batch_size)

    def _first(self, microbatches: int, rows: int) -> list[Microbatch]:
        weight = 1.0 / (rows * self.shape[1])
        tokens, targets = (t[:microbatches, :rows].unbind() for t in (self.tokens, self.targets))
        return [
            Microbatch(mine, {"part": Part(self._plan, self._cp, theirs, None, weight)})
            for mine, theirs in zip(tokens, targets, strict=True)
        ]

    def fill(self, step: int) -> None:
        """Copy this rank's chunks in."""
        whole = self._batches.tokens(step)
        for static, tokens in ((self.tokens, whole[..., :-1]), (self.targets, whole[..., 1:])):
            mine = split(tokens, 2, self._cp.size, self._cp.rank)
            if self._device.is_cuda:
                mine = mine.pin_memory()
            static.copy_(mine, non_blocking=True)

    def microbatches(self) -> list[Microbatch]:
        """The same static tensors at each step."""
        return self._microbatches

    def smaller(self, microbatches: int, rows: int) -> list[Microbatch]:
        """See `Inputs`; views of the same static tensors."""
        most = self.tokens.shape[:2]
        if not (1 <= microbatches <= most[0] and 1 <= rows <= most[1]):
            raise ValueError(
                f"Expected at most {most[0]} microbatches of {most[1]} rows, and one at least, got "
                f"{microbatches} of {rows}."
            )
        return self._first(microbatches, rows)

    @property
    def part(self) -> Part:
        """That of the first microbatch; attention sees the same in every one."""
        part: Part = self._microbatches[0].keywords["part"]
        return part

    def samples(self) -> dict[int, Part]:
        """The one part: plans never change."""
        return {self._cp.size: self.part}

    def named_tensors(self) -> NamedTensors:
        """Tokens, targets, and which tokens these are."""
        yield "tokens", self.tokens
        yield "targets", self.targets
        yield from _tensors_in("context plan", self._plan)


class PackInputs:
    """Packs of documents, over a number of context ranks that changes with the microbatch.

    Attributes:
        context: the groups of every size.
    """

    def __init__(self, config: TrainConfig, axes: Axes, device: Device) -> None:
        parallel = config.parallel
        sizes, self._axes, self._device = parallel.dynamic_cp, axes, device
        self.context = DynamicContext(
            groups(parallel, ("dp", "cp")), sizes, {axes.cp.size: axes.cp}
        )
        # The largest group has room for micro_batch_size of the longest sequences.
        local = config.micro_batch_size * config.model.seq // sizes[-1]
        self.shape = (1, local)
        self._capacities = {
            size: Capacity(
                tokens=local * size,
                slots=MAX_DOCUMENTS + 1,
                multiple=padding_multiple(
                    size, axes.tp.size, sequence_parallel=axes.sequence_parallel
                ),
                longest=config.model.seq,
            )
            for size in sizes
        }
        self._documents = PackedDocuments(
            token_source(config.data, config.model.vocab_size), config.seed, sizes, local,
            {size: each.multiple for size, each in self._capacities.items()}, config.model.seq,
        )  # fmt: skip
        self.checksum = self._documents.source.checksum
        self._number = config.microbatches
        whole = (config.microbatches, *self.shape)
        self.tokens = torch.zeros(whole, dtype=torch.int64, device=device.torch_device)
        self.targets = torch.zeros_like(self.tokens)
        self._local: list[LocalTokens] = []

    def fill(self, step: int) -> None:
        """Pack the documents of this rank's packs."""
        self._local = []
        for microbatch in range(self._number):
            size = self._documents.size(step, microbatch)
            at = self.context.layout(size)
            number = self._axes.dp_outer.rank * at.num_packs + at.pack
            found = self._documents.pack(step, microbatch, number)
            documents = [Document(ids[:-1], ids[1:]) for ids in map(torch.from_numpy, found)]
            batch: PackedBatch = pack(documents, self._capacities[size])
            batch = batch.to(self._device.torch_device)
            self._local.append(packed_part(batch, self.context.axis(size), 0.0))

    def microbatches(self) -> list[Microbatch]:
        """Those of the step, weighed by the tokens of all ranks."""
        return self._first(self._number)

    def _first(self, microbatches: int) -> list[Microbatch]:
        first = self._local[:microbatches]
        for number, local in enumerate(first):
            self.tokens[number].copy_(local.tokens)
            self.targets[number].copy_(local.part.targets)
        counted = torch.stack([local.part.num_counted for local in first]).sum()
        weight = loss_weight(counted, microbatches, self._axes)
        return [
            Microbatch(local.tokens, {"part": replace(local.part, weight=weight)})
            for local in first
        ]

    def smaller(self, microbatches: int, rows: int) -> list[Microbatch]:
        """See `Inputs`; collective. A pack is one row: there are no fewer."""
        if rows != 1 or not 1 <= microbatches <= self._number:
            raise ValueError(
                f"Expected at most {self._number} microbatches of 1 row, as packs are, and one at "
                f"least, got {microbatches} of {rows}."
            )
        return self._first(microbatches)

    def samples(self) -> dict[int, Part]:
        """For each size, that of a pack with one document, as long as there may be."""
        return {size: self._sample(size) for size in self.context.sizes}

    def _sample(self, size: int) -> Part:
        capacity = self._capacities[size]
        ids = torch.zeros(min(capacity.tokens, capacity.longest or capacity.tokens)).long()
        batch = pack([Document(ids, ids)], capacity).to(self._device.torch_device)
        return packed_part(batch, self.context.axis(size), 0.0).part

    def named_tensors(self) -> NamedTensors:
        """Copies of what was read; packs come and go."""
        yield "tokens", self.tokens
        yield "targets", self.targets


def _tensors_in(name: str, value: Any) -> NamedTensors:
    """Tensors in nested dataclasses and tuples."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(f"{name}[{index}]", item)

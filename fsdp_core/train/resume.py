"""A run that stops after a step and goes on in new processes: everything of a trainer that lasts.

    weights, routers' biases, what libraries' modules keep   of the stages' state_dicts
    AdamW's moments, step count and learning rate            states of an optimizer, by parameter
    random states of this rank                               `extra`, rank by rank

Data needs no position: a batch is a function of the step's number. Gradients, losses and digests
are made anew in each step, graphs are captured anew.
"""

from pathlib import Path
from typing import Any

import torch

from fsdp_core import checkpoint
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.train.trainer import Trainer


class _States(torch.optim.Optimizer):
    """The trainer's AdamW as a checkpoint takes optimizers: its states, by parameter at rest."""

    def __init__(self, trainer: Trainer) -> None:
        ours, groups = trainer.optimizer, trainer.groups
        self._lr = ours.lr
        parameters = {n: p for g in groups for n, p in zip(g.names, g.sharded, strict=True)}
        super().__init__([{"params": list(parameters.values()), "lr": ours.lr}], {})
        for name, *moments in zip(ours.names, ours.exp_avg, ours.exp_avg_sq, strict=True):
            parameter = parameters[name]
            exp_avg, exp_avg_sq = (_like(parameter, moment) for moment in moments)
            self.state[parameter] = {
                "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": ours.step_count
            }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the learning rate; moments were read into their places."""
        self._lr.copy_(state_dict["param_groups"][0]["lr"])


def _like(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, RowSharded):
        return RowSharded.make(rows, parameter.row_spec)
    return rows


def save_state(trainer: Trainer, folder: Path, step: int) -> None:
    """Save a trainer that has taken `step` steps. A collective; raises as `checkpoint.save`."""
    with trainer.device.on(trainer.stream):
        trainer.device.synchronize()
        extra = {"random": trainer.rng_states()}
        checkpoint.save(folder, step, list(trainer.stages), _States(trainer), extra)


def load_state(trainer: Trainer, folder: Path) -> int:
    """Put the latest of `folder` into a new trainer; the steps that were taken. A collective. Of
    another layout random states say nothing: those of a new trainer stay as they are (`ValueError`,
    `CheckpointError`: as `checkpoint.load`; other ranks than those that saved).
    """
    with trainer.device.on(trainer.stream):
        loaded = checkpoint.load(folder, list(trainer.stages), _States(trainer))
        if not trainer.config.begins_elsewhere:
            trainer.set_rng_states(loaded.extra["random"])
        trainer.device.synchronize()
    return loaded.step

"""The faults of graphs under FSDP that are planted, and what each is."""

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_core.device import Device
from tests.graph_faults import stack, stack_faults, trainer_faults, training
from tests.graph_faults.programs import WARMUP, Leg, Planting, Program, nothing


@dataclass(frozen=True, kw_only=True)
class GraphFault:
    """One fault.

    Attributes:
        name: number in the list of failure modes, with a letter where it is planted in two ways.
        what: is wrong, in a few words.
        program: `stack.KINDS` or `training.MODES` that it is planted in.
        plant: the fault.
        right: what the program does instead where it is right; the reference does it, too.
        refused: the same fault with the check that stops it, where the plant takes one away.
        quick: columns that the suite's short test runs.
    """

    name: str
    what: str
    program: str
    plant: Planting
    right: Planting = nothing
    refused: Planting | None = None
    quick: tuple[str, ...] = ()

    @property
    def maker(self) -> Callable[[Leg, Device], Program]:
        """Makes the program."""
        is_training = self.program in training.MODES
        return training.maker_of(self.program) if is_training else stack.maker_of(self.program)

    @property
    def num_ranks(self) -> int:
        """Ranks of the program."""
        mode = training.MODES.get(self.program)
        return stack.KINDS[self.program] if mode is None else mode.num_ranks


FAULTS = (
    GraphFault(
        name="F01a",
        what="a unit's hooks stay on the module and act inside of the capture",
        program="modules",
        plant=stack_faults.hooks_left_on,
    ),
    GraphFault(
        name="F01b",
        what="the gather before backward is tied to the capture's outputs, not the replay's",
        program="layer",
        plant=trainer_faults.outputs_marked_at_capture,
    ),
    GraphFault(
        name="F02a",
        what="hooks of inner layers count in Python, and are captured",
        program="modules",
        plant=stack_faults.ramp_in_python,
        right=stack_faults.ramp_on_device,
        refused=stack_faults.ramp_in_python_refused,
        quick=("plain",),
    ),
    GraphFault(
        name="F02b",
        what="units inside of what is captured gather at capture, and at no replay",
        program="nested",
        plant=stack_faults.inner_units_left_alone,
    ),
    GraphFault(
        name="F03a",
        what="hooks are gone once they are put back",
        program="modules",
        plant=stack_faults.hooks_lost,
        quick=("plain",),
    ),
    GraphFault(
        name="F03b",
        what="hooks are there twice once they are put back",
        program="modules",
        plant=stack_faults.hooks_doubled,
    ),
    GraphFault(
        name="F05",
        what="a fused kernel reads weights of units whose hooks nobody runs",
        program="fused",
        plant=stack_faults.kernel_bypasses_hooks,
        quick=("plain",),
    ),
    GraphFault(
        name="F08",
        what="the hooks that gather are not put back after the capture",
        program="layer",
        plant=trainer_faults.pre_hooks_not_put_back,
        quick=("plain",),
    ),
    GraphFault(
        name="F13a",
        what="the all-reduce over replicas is off while the step is captured",
        program="hsdp",
        plant=trainer_faults.all_reduce_off_at_capture,
    ),
    GraphFault(
        name="F13b",
        what="all microbatches are replayed from the first one's graph, which does not reduce",
        program="each",
        plant=stack_faults.one_graph(0),
        quick=("plain",),
    ),
    GraphFault(
        name="F13c",
        what="all microbatches are replayed from the last one's graph, which reduces",
        program="each",
        plant=stack_faults.one_graph(1),
    ),
    GraphFault(
        name="F14",
        what="gathered weights get other memory each time",
        program="attn",
        plant=trainer_faults.misordered("unstable_buffers"),
        quick=("ledger",),
    ),
    GraphFault(
        name="F17",
        what="loaded weights take the place of the captured ones",
        program="full",
        plant=trainer_faults.loads_by_assigning,
        right=trainer_faults.loads_in_place,
    ),
    GraphFault(
        name="F18",
        what="gradients are set to None between replays, the optimizer is outside",
        program="whole",
        plant=stack_faults.gradients_dereferenced,
        quick=("plain",),
    ),
    GraphFault(
        name="F19a",
        what="replays return the static gradients themselves",
        program="plain",
        plant=trainer_faults.gradients_alias,
        quick=("plain",),
    ),
    GraphFault(
        name="F19b",
        what="the same under FSDP",
        program="attn",
        plant=trainer_faults.gradients_alias,
    ),
    GraphFault(
        name="F31",
        what="gathers do not wait for the optimizer's writes",
        program="attn",
        plant=trainer_faults.misordered("gather_ignores_writes"),
    ),
    GraphFault(
        name="F32a",
        what="compute does not wait for the gather of its weights",
        program="attn",
        plant=trainer_faults.misordered("compute_ignores_gather"),
        quick=("races",),
    ),
    GraphFault(
        name="F32b",
        what="the same inside of a step that is captured whole",
        program="full",
        plant=trainer_faults.misordered("compute_ignores_gather", WARMUP),
    ),
    GraphFault(
        name="F33",
        what="the root's weights are given back before they are used",
        program="attn",
        plant=trainer_faults.misordered("early_release"),
        quick=("poison",),
    ),
    GraphFault(
        name="F34a",
        what="a gradient buffer is given back while it is being reduced",
        program="attn",
        plant=trainer_faults.misordered("buffer_ignores_reduction"),
    ),
    GraphFault(
        name="F34b",
        what="a reduction's outputs, of the compute stream's memory, are freed while it writes",
        program="attn",
        plant=trainer_faults.misordered("reduction_freed_early"),
    ),
    GraphFault(
        name="F47",
        what="a failed capture puts nothing back",
        program="modules",
        plant=stack_faults.capture_leaves_wreck,
        right=stack_faults.capture_refused,
        quick=("plain",),
    ),
    GraphFault(
        name="F65",
        what="every replay draws the capture's dropout masks",
        program="attn",
        plant=trainer_faults.masks_frozen,
    ),
    GraphFault(
        name="F67",
        what="the warm-up's counts of tokens stay",
        program="router",
        plant=trainer_faults.warm_up_leaves_state,
        quick=("plain",),
    ),
)

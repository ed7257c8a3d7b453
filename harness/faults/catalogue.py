"""The planted faults by name: what each does, what it takes, what must be reported.

Data only, no torch: the scenario decoder validates `plant` entries against it, and the worker
implements each fault under the same name. A fault is planted in the candidate unless the scenario
says otherwise; a fault with a `counterpart` puts that other fault into every leg it is not in
itself, so that the legs differ in one thing only.
"""

from collections.abc import Mapping
from types import MappingProxyType

from harness.faults.fault import Argument, Fault

LEGS = ("candidate", "reference", "control")

_HOLD_ATTENTION = ("attn", "layer", "full_iteration")
_AT_TENSOR: tuple[Argument, ...] = ("step", "rank", "tensor")
_AT_STEP: tuple[Argument, ...] = ("step", "rank")

_ENTRIES = (
    Fault(
        name="ulp",
        description="One element of a main weight moves by one ulp after the optimizer step.",
        takes=_AT_TENSOR,
        expects=("diverged",),
    ),
    Fault(
        name="nan",
        description="NaN is written into one element of a main weight.",
        takes=_AT_TENSOR,
        expects=("nonfinite", "diverged"),
    ),
    Fault(
        name="negative_zero",
        description="-0.0 is written into one element of a main weight, 0.0 in the other legs.",
        takes=_AT_TENSOR,
        expects=("diverged",),
        counterpart="positive_zero",
    ),
    Fault(
        name="positive_zero",
        description="0.0 is written into one element of a main weight (see negative_zero).",
        takes=_AT_TENSOR,
        expects=("diverged",),
    ),
    Fault(
        name="drop_step",
        description="The record of one step is not written.",
        takes=_AT_STEP,
        expects=("missing_step",),
    ),
    Fault(
        name="drop_rank",
        description="The rank trains along, writes no records and exits with 0.",
        takes=("rank",),
        expects=("missing_rank", "empty_run"),
    ),
    Fault(
        name="sigkill",
        description="The rank kills itself with SIGKILL before the step.",
        takes=_AT_STEP,
        expects=("killed",),
    ),
    Fault(
        name="hang",
        description="The rank sleeps for ever before the step.",
        takes=_AT_STEP,
        expects=("hang",),
    ),
    Fault(
        name="exit",
        description="The rank leaves with os._exit(13) before the step.",
        takes=_AT_STEP,
        expects=("crashed",),
    ),
    Fault(
        name="raise",
        description="The rank raises a Python exception before the step.",
        takes=_AT_STEP,
        expects=("crashed",),
    ),
    Fault(
        name="oom",
        description="The rank allocates until the allocator refuses.",
        takes=_AT_STEP,
        expects=("oom",),
    ),
    Fault(
        name="illegal_access",
        description="A kernel reads device memory out of bounds.",
        takes=_AT_STEP,
        expects=("illegal_access",),
        devices=("cuda",),
    ),
    Fault(
        name="stale_parameter",
        description="A parameter's storage is freed and re-allocated between capture and replay.",
        takes=_AT_TENSOR,
        expects=("stale_address",),
    ),
    Fault(
        name="hoard",
        description="The rank allocates twice its peak memory so far, and keeps it.",
        takes=_AT_STEP,
        expects=("memory_regression",),
    ),
    Fault(
        name="leak",
        description="From the step on, the rank keeps another MiB before each step.",
        takes=_AT_STEP,
        expects=("memory_regression",),
    ),
    Fault(
        name="small_leak",
        description="From the step on, the rank keeps another 64 KiB before each step.",
        takes=_AT_STEP,
        expects=("memory_regression",),
    ),
    Fault(
        name="segfault",
        description="The rank is ended by SIGSEGV before the step.",
        takes=_AT_STEP,
        expects=("crashed",),
    ),
    Fault(
        name="skip_graphs",
        description="No rank captures a graph: every step runs eagerly.",
        takes=(),
        expects=("not_replayed",),
    ),
    Fault(
        name="corrupt_record",
        description="Half a JSON line is written in place of the step's record.",
        takes=_AT_STEP,
        expects=("corrupt_record",),
    ),
    Fault(
        name="record_after_end",
        description="A step record is written after the end record.",
        takes=("rank",),
        expects=("record_after_end",),
    ),
    Fault(
        name="handshake_raise",
        description="The rank raises an exception as ranks agree to capture.",
        takes=("rank",),
        expects=("crashed",),
        scopes=_HOLD_ATTENTION,
    ),
    Fault(
        name="warm_up_raise",
        description="The rank raises an exception in a warm-up, before what ranks exchange there.",
        takes=("rank",),
        expects=("crashed",),
        scopes=_HOLD_ATTENTION,
    ),
    Fault(
        name="capture_raise",
        description="The rank raises an exception in a capture, at the same place.",
        takes=("rank",),
        expects=("crashed",),
        scopes=_HOLD_ATTENTION,
    ),
    Fault(
        name="capture_oom",
        description="The allocator refuses in a capture.",
        takes=("rank",),
        expects=("oom",),
        scopes=_HOLD_ATTENTION,
    ),
    Fault(
        name="capture_sigkill",
        description="The rank kills itself with SIGKILL in a capture.",
        takes=("rank",),
        expects=("killed",),
        scopes=_HOLD_ATTENTION,
    ),
    # What follows is for stressors: a plain run shows most of it seldom or never.
    Fault(
        name="gather_ignores_writes",
        description="Gathers do not wait for what is written on the compute stream.",
        takes=_AT_STEP,
        expects=("race", "diverged", "nonfinite"),
    ),
    Fault(
        name="compute_ignores_gather",
        description="Compute does not wait for the gather of its weights.",
        takes=_AT_STEP,
        expects=("race", "diverged", "nonfinite"),
    ),
    Fault(
        name="buffer_ignores_reduction",
        description="A gradient buffer is given back while it is being reduced.",
        takes=_AT_STEP,
        expects=("race", "diverged", "nonfinite"),
    ),
    Fault(
        name="reduction_freed_early",
        description="Outputs of a reduction are freed while it writes them.",
        takes=_AT_STEP,
        expects=("race", "diverged", "nonfinite"),
    ),
    Fault(
        name="early_release",
        description="The root's weights are given back before they are used.",
        takes=_AT_STEP,
        expects=("nonfinite", "diverged"),
    ),
    Fault(
        name="unstable_buffers",
        description="Gathered weights get other memory each time, under captured graphs.",
        takes=_AT_STEP,
        expects=("stale_address",),
    ),
)

CATALOGUE: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _ENTRIES})
"""Every fault by its name."""

"""Memory that moves, is exchanged or has two owners while a graph holds its address."""

from harness.faults.fault import AT_STEP, AT_TENSOR, Cell, Fault, Pointer

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="stale_parameter",
        description="A parameter's storage is freed and re-allocated between capture and replay.",
        takes=AT_TENSOR,
        expects=("stale_address",),
        kind="addresses",
        source="F17",
        symptom="weights that a graph reads do not change any more, or are rubbish",
        cell=Cell(graph=("attn",)),
        points_at=Pointer(
            phase="state",
            module="layers.0.attn.attention",
            tensor="layers.0.attn.attention.wq.weight",
        ),
    ),
    Fault(
        name="unstable_buffers",
        description="Gathered weights get other memory each time, under captured graphs.",
        takes=AT_STEP,
        expects=("stale_address",),
        kind="addresses",
        source="F14",
        symptom="replays read weights that others have put there",
        cell=Cell(graph=("attn",)),
        points_at=Pointer(
            phase="state",
            module="layers.0.attn.norm",
            tensor="layers.0.attn.norm.weight",
        ),
    ),
)

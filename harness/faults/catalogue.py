"""The planted faults by name: what each does, what it takes, what must be reported.

Data only, no torch: the scenario decoder validates `plant` entries against it, and the worker
implements each fault under the same name. `harness.faults.fault` says how the table is read. A
fault is planted in the candidate unless the scenario says otherwise; a fault with a counterpart
puts that other fault into every run it is not in itself, so that they differ in one thing only.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from harness.faults.fault import Fault, read_table

LEGS = ("candidate", "reference", "control")

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "model": "dense_tiny", "dtype": "fp32", "parallel": MappingProxyType({"dp": 2}),
        "steps": 6, "microbatches": 2, "seed": 1234,
    }
)  # fmt: skip
"""What setups build on, as `base` of a scenario has it. A key of a setup takes the place of the
whole key here: {"parallel": {"tp": 2}} is two ranks, not four."""

_OF_ANY_ENGINE = ("ulp", "nan", "negative_zero", "positive_zero")


def is_of_any_engine(fault: Fault) -> bool:
    """Whether a fault needs nothing of our engine: it is in data, weights, records or processes."""
    return fault.kind in ("data", "infrastructure") or fault.name in _OF_ANY_ENGINE


_TABLE = """
== hooks: Hooks that are lost, doubled or late, and flags that are not what the phase needs.

# The ledger says whose weights nobody has gathered.
pre_hooks_lost | F08 | step | graph=layer | stale_address diverged race | state layers.0* |
    The hooks that gather a layer before its forward are gone, on all ranks. |
    replays compute with weights from before the last update
outputs_unmarked | F01 | step rank | graph=layer | stale_address | state layers.0* |
    Outputs of a layer do not tell backward that it enters the layer. |
    backward computes with weights at rest, or stops
# All layers lose theirs; backward enters the last one first, and stops there.
hooks_not_restored | F03 | step | graph=layer step=2 | stale_address crashed diverged |
    state layers.* - |
    What is put back after a capture are the hooks that it had emptied. |
    the first step after the capture stops, or computes with old weights
hook_arguments_lost | F04 | step rank | - | crashed | forward layers.0 - |
    A hook is registered again without the mark that it takes keyword arguments. |
    a TypeError in the next forward
root_bypassed | F07 | step rank | - | crashed | forward embedding - |
    The root's forward is called past its hooks. |
    parameters of the root are at rest when they are computed with
hook_counts_on_host | F02 | step rank | graph=attn step=2 legs=candidate+reference+control |
    diverged | forward layers.0.attn.norm layers.0.attn* |
    A hook inside of what is captured counts its calls in Python. |
    the first replay is right, later ones repeat it
gradient_hook_late | F64 | step rank | microbatches=2 | diverged |
    backward layers.0.attn.norm layers.0.attn.norm.weight |
    Of a parameter's gradients every other one is not heard of until the next. |
    gradients of one microbatch land in another
gradient_hook_doubled | F03 | step rank | - | diverged |
    backward layers.0.attn.norm layers.0.attn.norm.weight |
    A hook that scales a gradient is there twice. |
    one parameter learns at twice the rate on one rank's data
final_callback_lost | F12 | step rank | stress=races | race | reduce - root main_grad |
    Nobody is asked to call the end of the backward pass. |
    on a busy GPU, gradients are clipped while they are being reduced
gather_skipped | F31 | step | - | diverged | forward layers.0* |
    A layer is not gathered any more; its buffer keeps what it holds. |
    the layer computes with weights from before the last update
gather_skipped_in_backward | F01 | step | model.preset=dense_tiny model.layers=3 |
    stale_address diverged | backward layers.0* |
    Backward does not gather a layer again, on all ranks. |
    gradients are computed with another layer's weights
kept_gathered | F45 | step | later=1 | diverged | forward layers.0* |
    A layer stays gathered over the optimizer's step, and counts as up to date. |
    the layer computes with the weights of one step for ever
zeroing_skipped | F63 | step rank | - | diverged | reduce - * |
    Gradients of the step before are not cleared. | gradients grow from step to step
last_flag_lost | F13 | step | microbatches=2 dp=2 dp_outer=2 | crashed | reduce |
    The last microbatch is not told that it is the last, on all ranks. |
    replicas drift, or gradients are missing
last_flag_frozen | F13 | step | microbatches=2 dp=2 dp_outer=2 | diverged | reduce - * |
    Every microbatch counts as the last of its step, on all ranks. |
    each microbatch is summed over replicas

== addresses: Memory that moves, is exchanged or has two owners while a graph holds its address.

# All of the unit moves: it has one buffer.
stale_parameter | F17 | step rank tensor | graph=attn | stale_address | state layers.0.* |
    A parameter's storage is freed and re-allocated between capture and replay. |
    weights that a graph reads do not change any more, or are rubbish
unstable_buffers | F14 | step rank | graph=attn | stale_address |
    state layers.0.attn.norm layers.0.attn.norm.weight |
    Gathered weights get other memory each time, under captured graphs. |
    replays read weights that others have put there
weights_assigned | F17 | step rank | graph=full_iteration | stale_address | state - * main_weight |
    Weights that are loaded take the place of those that graphs hold. |
    graphs go on with the weights from before the load
gradients_replaced | F18 | step rank | graph=full_iteration | stale_address | state - * main_grad |
    Gradients are other tensors than those that graphs write. |
    the optimizer reads gradients that never change
moments_replaced | F17 | step rank | graph=full_iteration | stale_address | state - * exp_avg* |
    An optimizer's state is loaded into new tensors. |
    a graph goes on with the moments from before the load
learning_rate_replaced | F17 | step rank | graph=full_iteration | stale_address | state - lr |
    A scheduler makes a new tensor of the learning rate. |
    the learning rate is for ever that of the capture
rope_replaced | F26 | step rank | graph=attn | stale_address | state rope rope.* |
    Tables of positions are made anew after the capture. |
    rotations are by what lies where the tables were
tokens_replaced | F27 | step rank | graph=full_iteration | stale_address | state - tokens |
    The loader fills other tensors than those that a graph reads. |
    every step trains on the tokens of the capture
random_state_replaced | F65 | step rank | graph=attn model=dense_tiny_dropout devices=cpu |
    stale_address | state - random state * |
    A random stream has another tensor for its state than graphs draw from. |
    masks and checkpoints go separate ways
gradient_buffer_moved | F25 | step rank | graph=full_iteration | stale_address |
    state layers.0 layers.0 full gradient |
    The buffer that gradients are reduced from moves under a graph. |
    gradients of one layer are written where nobody reads them
gather_buffer_given_twice | F15 | step rank | - | diverged | forward layers.0* |
    A pool gives two layers one buffer to gather into. |
    a layer computes with the next one's weights
gradient_buffer_given_twice | F38 | step rank | stress=races | race diverged |
    reduce - *grad buffer* |
    A pool gives two layers one buffer for their gradients. | gradients of one layer in another
microbatch_slot_frozen | F21 | step rank | graph=attn microbatches=2 pp=2 rank=0 |
    crashed diverged | forward layers.0.attn - |
    All microbatches are replayed in the slot of the first. |
    what the first microbatch saved is overwritten before its backward

== streams: Work that does not wait for other work, and memory that is given back too soon.

gather_ignores_writes | F31 | step rank | graph=attn stress=races | race diverged nonfinite |
    forward embedding root main_weight |
    Gathers do not wait for what is written on the compute stream. |
    on a busy GPU, weights of the step before; losses drift
compute_ignores_gather | F32 | step rank | graph=attn stress=races | race diverged nonfinite |
    forward embedding gather buffer of unit root |
    Compute does not wait for the gather of its weights. |
    on a busy GPU, garbage in the first product
buffer_ignores_reduction | F34 | step rank | graph=attn stress=races | race diverged nonfinite |
    reduce - grad buffer of unit * |
    A gradient buffer is given back while it is being reduced. |
    on a busy GPU, gradients of one unit in another
reduction_freed_early | F34 | step rank | graph=attn stress=races | race diverged nonfinite |
    reduce - *grad buffer of unit * |
    Outputs of a reduction are freed while it writes them. |
    under memory pressure, gradients that something else overwrote
early_release | F33 | step rank | graph=attn stress=poison+scramble | nonfinite diverged |
    forward embedding embedding* |
    The root's weights are given back before they are used. |
    under memory pressure, weights that the next gather overwrote
reduction_ignores_gradients | F36 | step rank | stress=races | race diverged nonfinite |
    reduce - grad buffer of unit * |
    Reductions do not wait for the gradients that backward writes. |
    on a busy GPU, sums of gradients that were not all there
clip_ignores_reductions | F48 | step rank | stress=races | race diverged nonfinite |
    reduce - grad buffer of unit * |
    What follows backward does not wait for the last reduction. |
    on a busy GPU, the first layers train on half of their gradients
refilled_while_reduced | F63 | step rank | stress=races microbatches=2 | race diverged nonfinite |
    reduce - grad buffer of unit * |
    A microbatch's gradients go where those of the last are being reduced. |
    on a busy GPU, gradients of one microbatch count twice and of another never
replica_sum_unordered | F38 | step rank | stress=races dp_outer=2 | race diverged nonfinite |
    reduce - *main_grad |
    Replicas are summed on a stream that nothing waits for. |
    on a busy network, all layers get the gradient of the last
clip_unordered | - | step rank | stress=races | race diverged nonfinite | reduce - *main_grad |
    Gradients are clipped on a stream that nothing waits for. |
    on a busy GPU, some steps are not clipped
gathered_ahead | F45 | step | - | diverged | forward layers.1* layers.1.* |
    A layer's weights are gathered for a step before the update that it follows. |
    nothing: one layer was a step behind

== capture: Captures that fail, are not made, or do more or less than their replays.

skip_graphs | F56 | - | graph=attn | not_replayed | capture |
    No rank captures a graph: every step runs eagerly. |
    the training is right, and as slow as without graphs
layer_not_captured | - | - | graph=attn scopes=attn+mlp+moe_router+moe+layer | not_replayed |
    capture layers.* - |
    The last layer is not captured and runs eagerly, on all ranks. |
    the training is right, and slower than with all graphs
scope_not_captured | - | - | graph=attn+mlp scopes=mlp+moe_router+moe | not_replayed |
    capture layers.* - |
    Of several scopes only the first is captured, on all ranks. |
    the training is right, and slower than with all graphs
optimizer_not_captured | - | - | graph=full_iteration scopes=full_iteration | not_replayed |
    capture |
    The graph of the whole step leaves out the optimizer's, on all ranks. |
    the training is right, and slower than with all graphs
microbatches_not_replayed | - | - | graph=attn scopes=attn+mlp+moe_router+moe+layer | not_replayed |
    capture layers.* - |
    Only the first microbatch of a step is replayed, on all ranks. |
    the training is right, and slower than with all graphs
handshake_raise | F47 | rank | graph=attn tp=2 timeout_s=20 scopes=attn+layer+full_iteration |
    crashed | capture |
    The rank raises an exception as ranks agree to capture. |
    one rank stops, the others wait to agree
warm_up_raise | F47 | rank | graph=attn tp=2 timeout_s=20 scopes=attn+layer+full_iteration |
    crashed | capture layers.0.attn.attention - |
    The rank raises an exception in a warm-up, before what ranks exchange there. |
    one rank stops, the others wait in a collective of the warm-up
capture_raise | F47 | rank |
    graph=full_iteration tp=2 timeout_s=20 scopes=attn+layer+full_iteration |
    crashed capture_refused | capture layers.0.attn.attention - |
    The rank raises an exception in a capture, at the same place. |
    one rank stops, the others wait in a collective of the capture
capture_oom | F54 | rank | graph=attn tp=2 timeout_s=20 scopes=attn+layer+full_iteration |
    oom capture_refused | capture layers.0.attn.attention - |
    The allocator refuses in a capture. | out of memory, though the eager run fits
capture_sigkill | - | rank | graph=attn tp=2 timeout_s=20 scopes=attn+layer+full_iteration |
    killed | capture layers.0.attn.attention - |
    The rank kills itself with SIGKILL in a capture. |
    the others wait in a collective of the capture
masks_frozen | F65 | step | graph=attn model=dense_tiny_dropout | diverged | forward layers.0* |
    Every replay draws the dropout masks of one, and uses no numbers up. |
    slow convergence: each step drops the same
draws_restored | F65 | step | graph=attn model=dense_tiny_dropout step=2 | diverged |
    forward layers.0.* |
    Each replay puts back the random numbers that it found. |
    what is drawn after a replay drops what the replay dropped
warm_up_draws | F67 | step | graph=attn model=dense_tiny_dropout step=2 | diverged | capture |
    Random numbers that a warm-up drew are not given back. |
    masks are others than without graphs, from the capture on
warm_up_counts | F67 | step | graph=attn+moe_router model=mla_moe_tiny step=2 | diverged |
    capture layers.1.mlp.moe.router layers.1.mlp.moe.router.expert_bias |
    Tokens that a warm-up routed stay counted. |
    experts' biases are moved by tokens that were never trained on
captured_step_repeated | F82 | step | graph=full_iteration step=2 | not_replayed diverged |
    capture |
    The step that is captured runs twice. | one batch counts double, the step count is off by one
captured_step_not_run | F82 | step | graph=full_iteration step=2 | diverged not_replayed | capture |
    The step that is captured is counted as run, and was not. |
    one batch is lost; its loss is that of the step before
step_count_on_host | F13 | step | graph=full_iteration step=2 later=1 | diverged | optimizer - * |
    The optimizer's step count is a number of Python at the capture. |
    bias correction stays that of the capture
one_rank_never_captures | F56 | rank | graph=attn tp=2 timeout_s=20 | hang crashed | capture |
    One rank runs eagerly where the others capture. |
    ranks wait for each other in different collectives
host_read_in_capture | F53 | step rank | graph=attn step=2 | capture_refused |
    capture layers.0.attn* - |
    A value is read on the host inside of what one rank captures. |
    the capture is refused, on all ranks
replay_lost | - | step rank | graph=attn | diverged | forward layers.0.attn* |
    One launch of a graph does nothing. | a layer gives what it gave for the batch before, once
graph_input_not_copied | F81 | step rank | graph=attn | diverged | forward layers.0.attn* |
    A layer's graph is replayed without its input being copied in. |
    a layer gives what it gave for the batch before
graph_gradient_not_copied | F35 | step rank | graph=attn | diverged | backward layers.0.attn* |
    A layer's backward graph is replayed over the gradient of an earlier batch. |
    gradients of a layer have nothing to do with the loss
inputs_not_filled | F27 | step rank | graph=full_iteration | diverged nonfinite | input - * |
    The static tokens of a graph are not filled any more. |
    one batch again and again; the loss falls fast
graphs_exchanged | F21 | step rank | graph=attn | stale_address crashed diverged |
    state layers.*.attn* |
    Two layers are replayed from each other's graphs. | layers in the wrong order
graph_of_other_layer | F21 | step | graph=attn fsdp.strategy=optim | diverged |
    forward layers.1.attn* |
    The second layer is replayed from the first layer's graphs. |
    one layer works twice, the other never
side_stream_not_joined | F48 | step rank | graph=attn step=2 devices=cuda |
    capture_refused crashed | capture layers.0.attn* - |
    A side stream that a capture forks is not joined. | the capture is refused as unjoined
device_wait_in_capture | F53 | step rank | graph=attn step=2 devices=cuda |
    capture_refused crashed | capture layers.0.attn* - |
    The host waits for the device inside of a capture. | the capture is refused as not permitted
event_from_before_capture | F46 | step rank | graph=attn step=2 devices=cuda |
    capture_refused crashed | capture layers.0.attn* - |
    A capture waits for an event that was recorded before it. |
    the capture is refused as not isolated

== collectives: Collectives that are lost, doubled, of the wrong group, or in another order.

gradients_not_reduced | F13 | step | - | diverged | reduce layers.1* layers.1.* |
    Ranks keep their own gradients of a layer in place of the sum. |
    the layer learns from half of the data, each half of its rows from another
gradients_summed | - | step | - | diverged | reduce layers.1* layers.1.* |
    Gradients of a layer are summed over the ranks, not averaged. |
    the layer's gradients grow with the number of ranks
replicas_not_summed | F13 | step | dp_outer=2 needs.dp_outer=2 | diverged |
    reduce layers.1* layers.1.* |
    Gradients of a layer are not summed over the replicas (HSDP). | replicas drift apart
replicas_of_other_axis | - | step | dp=2 dp_outer=2 needs.dp_outer=2 | diverged |
    reduce layers.1* layers.1.* |
    Gradients of a layer are summed over the shards in place of the replicas. |
    replicas drift apart, and gradients of other rows are mixed
stale_shard | F17 | step rank | - | diverged | forward layers.1* layers.1.* |
    Gathers get a shard of one rank that is a step old, and stays so. |
    half of a layer is trained and not used
exchanged_shards | - | step rank | - | diverged nonfinite | forward layers.1* layers.1.* |
    A rank has the gathered shards of a layer in another order. | the loss jumps, and falls again
gathers_in_other_order | F42 | step rank | - | diverged nonfinite | forward layers.0* layers.0.* |
    A rank gathers two layers in the other order: each gets shards of both. |
    a hang, or where layers are alike a loss that jumps
skipped_all_reduce | F56 | step rank | timeout_s=20 | hang crashed diverged | reduce |
    A rank leaves out the all-reduce of the loss, and all others wait for it. | a hang
norm_of_own_shard | - | step | - | diverged | reduce - grad_norm |
    The gradient norm is that of a rank's own shards. |
    the norm falls with the number of ranks, and each rank clips by another
norm_counts_copies | F72 | step | tp=2 | diverged | reduce - grad_norm |
    The gradient norm counts replicated parameters once a tp rank. | the norm grows a little with tp
norm_over_two_axes | - | step | dp=2 tp=2 pp=2 | diverged | reduce - grad_norm |
    The gradient norm is summed over two axes: with shards and tp, not over pp. |
    nothing in any product of two axes; in one of three each stage clips by its own
exchanged_experts | - | step rank | model.preset=moe_tiny model.capacity_factor=1.25 dp=2 ep=2 |
    diverged | forward layers.1.mlp.moe.dispatch layers.1.mlp.moe.dispatch* |
    The tokens of two experts are swapped on their way. | the loss jumps, and falls again
lost_expert_gradient | F35 | step rank |
    model.preset=moe_tiny model.capacity_factor=1.25 dp=2 ep=2 | diverged |
    backward layers.1.mlp.moe.experts* layers.1.mlp.moe.experts.gate.weight |
    The gradient of one expert's gate never reaches the reduction. |
    nothing: the loss falls as before, one expert learns nothing
bias_of_own_tokens | F68 | step | model=mla_moe_tiny dp=2 ep=2 | diverged |
    optimizer layers.1.mlp.moe.router layers.1.mlp.moe.router.expert_bias |
    The bias of experts follows the tokens of one rank, not of all. | ranks route by other biases
wrong_splits | F80 | step rank | model=moe_tiny dp=2 ep=2 timeout_s=20 | hang crashed | forward |
    A rank expects one row of experts more than it is sent. | a hang, or an error of the exchange
row_sum_missing | - | step | tp=2 needs.tp=2 | diverged |
    forward layers.1.attn.attention.wo layers.1.attn.attention.wo:output |
    The output of attention is a tp rank's part of it, not the sum. |
    tp ranks have other activations; the loss jumps
column_sum_missing | - | step | tp=2 needs.tp=2 | diverged |
    backward layers.1.attn.* layers.1.attn.norm* |
    The gradient of attention's input is a tp rank's part of it, not the sum. |
    copies of norms drift apart over tp
norm_sum_missing | F72 | step |
    tp=2 sequence_parallel=true needs.tp=2 needs.sequence_parallel=true | diverged |
    backward layers.1.mlp.norm layers.1.mlp.norm.weight |
    The gradient of a norm is not summed over tp under sequence parallel. |
    copies of the norm's weight drift apart over tp
skipped_hop | - | step rank | cp=2 | diverged | forward layers.0.attn.attention* |
    A context rank drops keys that come round the ring, and uses its own again. |
    tokens do not see the other half of the sequence
unweighted_merge | - | step rank | cp=2 | diverged | forward layers.0.attn.attention* |
    Attention over blocks is their plain mean, whatever their sums are. |
    attention is flatter, the loss a little higher
activation_of_another_microbatch | F24 | step | pp=2 microbatches=2 needs.pp=2 | diverged |
    forward layers.1* |
    A stage sends the activation of the microbatch before. |
    the loss rises: half of the tokens are of other targets
gradient_of_another_microbatch | F24 | step | pp=2 microbatches=2 needs.pp=2 | diverged |
    backward layers.0* |
    A stage sends back the gradient of the microbatch before. |
    the loss falls slower; the first stage trains on other gradients

== numerics: Numbers that are wrong: of weights, gradients, moments, or of how they are made.

other_initialisation | - | rank | - | diverged | initialisation - *.weight |
    A rank draws its first weights from another seed. |
    nothing: the training begins from other weights
ulp | - | step rank tensor | - | diverged | optimizer norm norm.weight |
    One element of a main weight moves by one ulp after the optimizer step. |
    weights and losses drift apart in their last bits from then on
nan | - | step rank tensor | - | nonfinite diverged | optimizer norm norm.weight |
    NaN is written into one element of a main weight. | the loss is NaN from the next step on
negative_zero | - | step rank tensor | counterpart=positive_zero | diverged |
    optimizer norm norm.weight |
    -0.0 is written into one element of a main weight, 0.0 in the other legs. |
    nothing; a quotient or a square root may get another sign later
positive_zero | - | step rank tensor | - | diverged | optimizer norm norm.weight |
    0.0 is written into one element of a main weight (see negative_zero). | one weight is lost
rope_off_by_one | F26 | step rank | - | diverged | forward *rope *rope:output |
    Tables of RoPE begin with the second position. | nothing: distances between tokens stay the same
softmax_scale | - | step | - | diverged | forward layers.0.attn.attention* |
    Attention scales by 1 / D where it should by 1 / sqrt(D). |
    attention is flatter, the loss a little higher
nan_activation | - | step rank | - | nonfinite | forward layers.1.mlp.mlp layers.1.mlp.mlp:output |
    One element of an activation is NaN. | the loss is NaN
loss_scale | F68 | step | microbatches=2 | diverged | backward - head:gradient |
    Backward begins with the loss of the last microbatch undivided. |
    the last microbatch counts as often as there are microbatches
logged_aux_loss | - | step | model=moe_tiny | diverged | forward - layers.*.router.balance_loss |
    A router's load-balancing loss is logged doubled; its gradient is right. |
    a curve that nobody can explain
aux_loss_scale | F68 | step | microbatches=2 model=moe_tiny dp=2 ep=2 | diverged |
    backward layers.1.mlp* |
    The balancing loss is not divided by the number of microbatches. |
    experts are balanced harder than asked for
ignored_bias | F67 | step | model.preset=mla_moe_tiny model.expert_bias_rate=0.1 dp=2 ep=2 |
    diverged | forward layers.1.mlp.moe.router layers.1.mlp.moe.router:output |
    Experts are chosen without their bias. | a few experts get most tokens
flushed_denormals | - | step rank | optim.clip_grad_norm=1e-19 devices=cpu | diverged | optimizer |
    A rank takes numbers below the smallest normal one for zero. |
    nothing, as long as gradients are not tiny
gradient_rows_swapped | - | step rank | - | diverged |
    backward layers.1* layers.1.mlp.mlp.down.weight |
    Two rows of a gradient are swapped. | nothing: norms and sums are the same
gradient_row_negated | - | step rank | - | diverged |
    backward layers.1* layers.1.mlp.mlp.down.weight |
    A row of a gradient has the other sign. | nothing: the norm is the same
gradient_ulp | - | step rank | - | diverged | backward layers.1* layers.1.mlp.mlp.down.weight |
    The elements of a gradient's row are one ulp off. | nothing
gradient_noise | - | step rank | legs=reference+control | nondeterministic_reference |
    backward layers.1* layers.1.mlp.mlp.down.weight |
    Low bits of a gradient are other ones in each run. | two runs of one program differ
overwritten_gradient | F19 | step | microbatches=2 | diverged | reduce layers.1* layers.1.* |
    A microbatch's gradient takes the place of the sum so far. |
    a layer learns from the last microbatch alone
gradient_counted_twice | F64 | step | - | diverged | reduce layers.1* layers.1.* |
    Gradients of a layer are added to themselves. | the gradient norm rises
microbatch_counted_twice | F64 | step | microbatches=2 | diverged | backward - * |
    Gradients of the last microbatch count twice, before they are reduced. |
    nothing: the last microbatch weighs double
microbatch_added_twice | F64 | step | microbatches=2 | diverged | reduce - * |
    Gradients of the last microbatch are added twice, once they are reduced. |
    nothing: the last microbatch weighs double
rounded_gradients | - | - | - | diverged | reduce |
    Gradients are reduced in bfloat16. | nothing for long: small gradients are lost
clipped_twice | - | step | optim.clip_grad_norm=0.1 | diverged | optimizer |
    Gradients are clipped, and clipped again. | nothing: they are clipped to what they are
unclipped_layer | F72 | step | optim.clip_grad_norm=0.1 | diverged |
    optimizer layers.1* layers.1.* |
    Clipping leaves out a layer. | spikes of one layer's weights
step_count | - | step rank | - | diverged | optimizer - step_count |
    A rank's optimizer counts a step more than it took. | corrections of moments end a step early
lost_bias_correction | - | step | - | diverged | optimizer |
    Moments are not corrected for their start at zero. | first steps are too small
decayed_norms | F72 | step | - | diverged | optimizer *norm *norm.weight |
    Weight decay takes in the weights of norms. | nothing for long
learning_rate | - | step rank | - | diverged | optimizer |
    A rank's learning rate is half of the others'. | nothing: its rows learn slower
epsilon | - | step | - | diverged | optimizer |
    The optimizer's epsilon is a thousand times larger. | nothing for long
skipped_update | F82 | step rank | - | diverged | optimizer |
    A rank leaves out one update. | nothing: its rows are a step behind
update_repeated | F82 | step | - | diverged | optimizer - step_count |
    All that comes after the gradients is done twice. | each batch moves the weights twice
recorded_loss | - | step rank | - | diverged | outside - microbatch_losses* |
    A rank records a loss an ulp off; nothing is computed from it. |
    losses are not those that were trained on
exchanged_moments | F70 | step rank | - | diverged |
    optimizer layers.1* layers.1.mlp.mlp.down.weight* |
    Second moments of two rows change places. | nothing
rounded_main_weights | F76 | step rank | - | diverged | optimizer |
    Main weights are rounded to bfloat16 after each update. |
    small updates are lost; the loss stops falling early
updated_neighbour | F62 | step rank | - | diverged | optimizer layers.1* layers.1.mlp.mlp.*.weight |
    The update of a matrix goes to where it begins less one element. | nothing
copies_left_stale | F69 | step | fsdp.strategy=optim step=5 | diverged |
    optimizer layers.1* layers.1.* |
    A layer's copies of weights do not follow the last update of the run. |
    nothing, until something else computes with them
stale_model_weights | F69 | step | fsdp.strategy=optim | diverged | forward layers.1* layers.1.* |
    A layer computes with copies of weights that no longer follow. |
    the loss falls slower: one layer does not learn

== data: Tokens, masks and random numbers that are others than they should be.

same_shard | - | step rank | - | diverged | input embedding embedding:input |
    A rank reads the shard of another. | nothing: half of the data is read twice, the rest never
same_data | - | step rank | graph=attn step=0 legs=reference+control+candidate | same_data |
    input - tokens |
    A rank reads the shard of another, in every run. |
    nothing: half of the data is read twice, the rest never
other_shuffle | - | step rank | - | diverged | input embedding embedding:input |
    A rank shuffles by another seed. | nothing
shifted_epoch | - | step rank | - | diverged | input embedding embedding:input |
    A rank reads the data of the step after. | nothing
unshifted_labels | - | step rank | - | diverged | input - targets |
    A rank's labels are its inputs, not the tokens after them. |
    the loss falls fast, and the model learns to copy
repeated_microbatch | F81 | step rank | microbatches=2 | diverged |
    input embedding embedding:input |
    A rank's last microbatch is its first again. | nothing: some of the data is never read
zeroed_token | - | step rank | - | diverged | input embedding embedding:input |
    The last token of a rank's step is lost on its way in. | nothing
microbatches_in_other_order | F21 | step rank | microbatches=2 pp=2 rank=0 | diverged |
    input embedding embedding:input |
    A pipeline's first stage takes microbatches in another order. |
    the loss rises: tokens are of other targets
tokens_of_another_group | - | step rank | tp=2 | nonfinite diverged |
    input embedding embedding:input |
    A tp rank has tokens of another sequence than its group. | the loss rises, and does not fall far
swapped_halves | - | step rank | cp=2 | diverged | input *rope *rope:input |
    A context rank turns its early tokens by the positions of its late ones. |
    the loss is a little higher
counted_padding | F53 | step | dp=2 dynamic_cp=[1,2] | diverged | input head *loss* |
    Predictions at padding count. | the loss falls too low
lost_boundary | - | step rank | dp=2 dynamic_cp=[1,2] | diverged |
    forward layers.0.attn.attention* layers.0.attn* |
    A rank takes the first two documents of a pack for one. | tokens see another document
uneven_weights | - | step rank | dp=2 dynamic_cp=[1,2] | diverged | input head *loss* |
    A rank divides the loss of a pack by its own tokens. | tokens of short packs count more
repeated_masks | F65 | step rank | model=dense_tiny_dropout | diverged |
    forward layers.0.attn layers.0.attn:output |
    A rank seeds its generator anew at each step: all steps drop alike. |
    dropout does less than it should
masks_of_one_draw | F65 | step rank | model=dense_tiny_dropout | diverged |
    forward layers.0.mlp layers.0.mlp:output |
    Drawing does not advance a rank's generator: all layers drop alike. |
    dropout does less than it should
seeded_alike | F75 | step | model=dense_tiny_dropout | diverged |
    forward layers.0.attn layers.0.attn:output |
    All ranks draw the same numbers. | nothing: masks are less random than they should be
seeded_by_rank | F75 | step | model=dense_tiny_dropout tp=2 | diverged |
    forward layers.0.attn layers.0.attn:output |
    Tp ranks that hold copies of an activation drop other parts of it. |
    tp ranks drift apart; the loss rises
seeded_by_entropy | - | step rank | model=dense_tiny_dropout legs=reference+control |
    nondeterministic_reference | forward layers.0.attn layers.0.attn:output |
    A rank seeds its generator by what the operating system has gathered. |
    two runs of one program differ
drawn_aside | F71 | step rank | - | diverged | input - c* |
    Somebody else draws a number from a rank's generator. | nothing, until something draws from it
dropout_off | F71 | step rank | model=dense_tiny_dropout | diverged |
    forward layers.0.attn layers.0.attn:output |
    A rank's attention branch drops nothing. | the loss falls a little

== infrastructure: Processes that die, memory that runs out, records that are lost.

drop_step | - | step rank | - | missing_step | outside |
    The record of one step is not written. | a hole in the log, which a plot bridges
drop_rank | - | rank | - | missing_rank empty_run | outside |
    The rank trains along, writes no records and exits with 0. | nothing: rank 0's log is whole
sigkill | - | step rank | - | killed | outside |
    The rank kills itself with SIGKILL before the step. |
    the others wait for the rank, then report a lost connection
hang | - | step rank | timeout_s=20 | hang | outside |
    The rank sleeps for ever before the step. | every rank waits, for ever
exit | - | step rank | - | crashed | outside |
    The rank leaves with os._exit(13) before the step. | a rank is gone without a word
raise | - | step rank | - | crashed | outside |
    The rank raises a Python exception before the step. |
    one traceback, and many of ranks that lost their peer
oom | - | step rank | - | oom | outside |
    The rank allocates until the allocator refuses. | out of memory
illegal_access | F14 | step rank | devices=cuda | illegal_access | outside |
    A kernel reads device memory out of bounds. | an illegal memory access, reported by a later call
hoard | - | step rank |
    checks.peak_memory.max_ratio=1.25 checks.peak_memory.max_growth_bytes=65536 |
    memory_regression | outside |
    The rank allocates twice its peak memory so far, and keeps it. | another model no longer fits
leak | - | step rank |
    steps=8 checks.peak_memory.max_ratio=1.25 checks.peak_memory.max_growth_bytes=65536 |
    memory_regression | outside |
    From the step on, the rank keeps another MiB before each step. | out of memory, hours later
small_leak | - | step rank |
    steps=8 checks.peak_memory.max_ratio=1.25 checks.peak_memory.max_growth_bytes=65536 |
    memory_regression | outside |
    From the step on, the rank keeps another 64 KiB before each step. | out of memory, days later
segfault | - | step rank | - | crashed | outside |
    The rank is ended by SIGSEGV before the step. | a rank is gone, and a core file may be there
corrupt_record | - | step rank | - | corrupt_record | outside |
    Half a JSON line is written in place of the step's record. |
    a log that a lenient reader goes on with
record_after_end | - | rank | - | record_after_end | outside |
    A step record is written after the end record. | a log that says more steps than were asked for
sigterm | - | step rank | - | killed | outside |
    The rank is ended by SIGTERM before the step. | a rank is gone, as schedulers end them
stopped | - | step rank | timeout_s=20 | hang | outside |
    The rank is stopped before the step, and is there. |
    every rank waits; the process list shows nothing wrong
left_group | F58 | step rank | - | crashed | outside |
    The rank leaves its process groups before the step. |
    one rank fails in a collective, the others lose their peer
hang_at_end | F58 | rank | timeout_s=20 | hang | outside |
    The rank sleeps for ever once it has written its last record. |
    the training is done and the job does not end
exit_at_end | F58 | rank | - | crashed | outside |
    The rank leaves with an error once it has written its last record. |
    the log is whole and the job has failed
repeated_record | - | step rank | - | corrupt_record | outside |
    The record of a step is written twice. | a step counts double in a mean
record_of_another_rank | - | step rank | - | corrupt_record | outside |
    The record of a step says that it is another rank's. | one rank is held against another
record_of_another_run | - | rank | - | corrupt_record | outside |
    A rank's file is that of another run. | yesterday's log is taken for today's
records_out_of_order | - | step rank | - | corrupt_record | outside |
    The record of a step comes after that of the next. | two steps change places
record_of_the_step_before | - | step rank | - | diverged | outside |
    The record of a step holds the state of the step before. | state seems to stand still for a step
end_record_lost | - | rank | - | corrupt_record | outside |
    A rank ends well, and its last record is not there. | a log that was cut looks whole
other_environment | - | rank | - | different_environment | outside |
    A variable that libraries go by is set in one leg alone. | bits differ from machine to machine
"""

CATALOGUE: Mapping[str, Fault] = MappingProxyType(
    {fault.name: fault for fault in read_table(_TABLE)}
)
"""Every fault by its name."""

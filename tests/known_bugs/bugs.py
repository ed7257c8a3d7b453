"""Bugs that sharded training is known to have had, each as a change of our code, and its test."""

from dataclasses import dataclass

FSDP = "fsdp_core/fsdp/"
REGRESSIONS = "tests/dist/test_fsdp_regressions.py::"
SCHEDULE = "tests/dist/test_fsdp_schedule.py::"


@dataclass(frozen=True)
class Bug:
    """How to put one bug back: `right` in `file` becomes `wrong`; `test` must then fail.

    Attributes:
        symptom: what a user would see, or not see.
    """

    name: str
    symptom: str
    file: str
    right: str
    wrong: str
    test: str


BUGS = (
    Bug(
        "stale_gather",
        "a forward computes with the weights from before the optimizer",
        FSDP + "unit.py",
        "if any(group.is_unsharded and not group.is_current for group in self.groups):",
        "if False:",
        REGRESSIONS + "test_stale_gather",
    ),
    Bug(
        "replaced_parameter_is_put_back",
        "a bias that was set to None, or swapped for a call, is computed with all the same",
        FSDP + "param_group.py",
        "            if any(m._parameters.get(name) is not self.sharded[index] for",
        "            if any(m._parameters is None for",
        "tests/dist/test_fsdp_interface.py::test_interface",
    ),
    Bug(
        "second_name_is_not_assigned",
        "what load_state_dict assigns to a tied parameter's second name is overwritten",
        FSDP + "param_group.py",
        "        return next((p for p in held if p is not None and p is not parameter), parameter)",
        "        return next(held) or parameter",
        "tests/dist/test_fsdp_interface.py::test_interface",
    ),
    Bug(
        "gather_before_the_shard_is_written",
        "the side stream sends weights while the optimizer writes them",
        FSDP + "unit.py",
        "            stream.wait_stream(schedule.device.current_stream())\n",
        "",
        REGRESSIONS + "test_streams_wait",
    ),
    Bug(
        "compute_before_the_gather_has_ended",
        "a forward reads a buffer that is still being filled",
        FSDP + "unit.py",
        "            self.schedule.device.current_stream().wait_event(self.gathered_event)\n",
        "            pass\n",
        REGRESSIONS + "test_streams_wait",
    ),
    Bug(
        "inverted_wait",
        "compute waits for the reduction, and the reduction does not wait for the gradient",
        FSDP + "unit.py",
        "        stream.wait_stream(self.device.current_stream())\n        held",
        "        self.device.current_stream().wait_stream(stream)\n        held",
        REGRESSIONS + "test_streams_wait",
    ),
    Bug(
        "gradient_buffer_released_too_early",
        "a later unit's gradients overwrite one that is being reduced",
        FSDP + "unit.py",
        "            current.wait_event(reduction.event)\n            reduction",
        "            reduction",
        REGRESSIONS + "test_streams_wait",
    ),
    Bug(
        "gradient_into_a_buffer_under_reduction",
        "a microbatch overwrites the sum of the one before",
        FSDP + "unit.py",
        " if newest is not gradients else 0)",
        ")",
        REGRESSIONS + "test_streams_wait_for_each_strategy",
    ),
    Bug(
        "aliased_reduce_scatter_output",
        "ranks read what another rank's result has overwritten",
        FSDP + "gradients.py",
        "outputs = [like.new_empty(size) for size in sizes]",
        "outputs = [nest.slice(like, 0, k + 1) for k in range(first, levels)]",
        REGRESSIONS + "test_reduction_output_is_other_memory",
    ),
    Bug(
        "gradients_only_where_rows_are",
        "loops over gradients pair different parameters over ranks, or hang",
        FSDP + "gradients.py",
        "        home = self.main_grad if all(",
        "        wanted = [i for i in wanted if self.specs[i].local_numel]\n"
        "        home = self.main_grad if all(",
        REGRESSIONS + "test_empty_pieces_have_gradients",
    ),
    Bug(
        "fused_kernels_see_empty_shards",
        "fused optimizers are given tensors without elements",
        FSDP + "optimizer.py",
        "has = parameter.grad is not None and local.numel()",
        "has = parameter.grad is not None",
        "tests/dist/test_optimizers.py::test_a_step_over_rows_leaves_a_usual_optimizer",
    ),
    Bug(
        "skipped_units_are_not_reduced",
        "gradients of a unit that the last microbatch skips are added to the next step's",
        FSDP + "unit.py",
        "                unit.reduce()\n",
        "                pass\n",
        "tests/dist/test_fsdp_parity.py::test_skipped_by_the_last_microbatch",
    ),
    Bug(
        "every_gradient_buffer_lives",
        "memory grows with the number of layers",
        FSDP + "unit.py",
        "self.drain(keep=self.most_reductions - 1",
        "self.drain(keep=self.most_reductions + 9",
        REGRESSIONS + "test_gradient_buffers",
    ),
    Bug(
        "padding_is_reduced",
        "what the last user left between parameters reaches sums and norms",
        FSDP + "gradients.py",
        "            full[start:stop].zero_()\n",
        "            pass\n",
        REGRESSIONS + "test_padding_leaks_nothing",
    ),
    Bug(
        "absent_gradients_are_reduced",
        "a parameter off the path of the loss gets what lay in its buffer",
        FSDP + "gradients.py",
        "            self._views[index].zero_()\n        self._copied = set()",
        "            pass\n        self._copied = set()",
        "tests/unit/fsdp_core/fsdp/test_gradients.py",
    ),
    Bug(
        "double_accumulation",
        "a fused gradient is counted by its kernel and again by autograd",
        FSDP + "gradients.py",
        'if getattr(parameter, "grad_added_to_main_grad", False):',
        "if False:",
        REGRESSIONS + "test_fused_accumulation",
    ),
    Bug(
        "fused_kernel_adds_to_garbage",
        "a kernel that read its orders in forward adds to memory that nobody zeroed",
        FSDP + "gradients.py",
        "                view.zero_()\n",
        "                pass\n",
        REGRESSIONS + "test_fused_accumulation",
    ),
    Bug(
        "lost_attributes",
        "optimizers and tensor parallelism miss their marks on parameters",
        FSDP + "param_group.py",
        "        setattr(twin, name, value)\n",
        "        pass\n",
        REGRESSIONS + "test_attributes_are_carried",
    ),
    Bug(
        "wrapped_in_flight",
        "a unit's gathered parameters or gradients are lost by wrapping around it",
        FSDP + "api.py",
        "    _check_at_rest(inner)\n",
        "",
        REGRESSIONS + "test_wrapping_in_flight",
    ),
    Bug(
        "parameter_held_twice",
        "two units train two copies of a shared parameter",
        FSDP + "api.py",
        "        if hasattr(parameter, _HELD):",
        "        if False:",
        REGRESSIONS + "test_each_parameter_is_held_once",
    ),
    Bug(
        "recomputation_counts_as_forward",
        "activation recompute gathers again, or releases what backward needs",
        FSDP + "unit.py",
        "    return bool(torch._C._current_graph_task_id() != -1)\n",
        "    return False\n",
        SCHEDULE + "test_recompute_gathers_each_unit_once",
    ),
    Bug(
        "optim_shards_gradients",
        "ZeRO-1 reduces with every microbatch",
        FSDP + "layout.py",
        "for least in (3, 2, 1))",
        "for least in (3, 1, 1))",
        SCHEDULE + "test_collectives_of_a_step",
    ),
    Bug(
        "sum_in_place_of_the_mean",
        "the learning rate is multiplied by the number of ranks",
        FSDP + "gradients.py",
        "        if self.scale != 1.0:",
        "        if False:",
        "tests/dist/test_gradients.py::test_every_way_to_accumulate_gives_the_sum",
    ),
    Bug(
        "copies_do_not_follow_the_optimizer",
        "where weights are kept in the compute dtype, training does not change them",
        FSDP + "optimizer.py",
        "                group.main_weight_changed()\n",
        "                pass\n",
        "tests/dist/test_optimizers.py",
    ),
)
"""By what was found in reviews of other implementations, and in our own."""

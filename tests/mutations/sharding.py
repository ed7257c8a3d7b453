"""Bugs that sharded training is known to have had, each with the test that sees it come back.

By what was found in reviews of other implementations, and in our own.
"""

from tests.mutations.mutation import Mutation

REGRESSIONS, INTERFACE = "dist/test_fsdp_regressions.py::", "dist/test_fsdp_interface.py::"
API = "unit/fsdp_core/fsdp/test_api.py::"
SCHEDULE, OPTIMIZERS = "dist/test_fsdp_schedule.py::", "dist/test_optimizers.py"
PARITY = "dist/test_fsdp_parity.py::"


def bugs_of(file: str, *bugs: tuple[str, str, str, str]) -> list[Mutation]:
    """Name, right text, wrong text, and the test that then fails."""
    path = f"fsdp_core/fsdp/{file}"
    return [
        Mutation(name, path, right, wrong, (f"tests/{test}",)) for name, right, wrong, test in bugs
    ]


SHARDING = [
    *bugs_of(
        "unit.py",
        # A forward computes with the weights from before the optimizer.
        ("stale_gather",
         "if any(group.is_unsharded and not group.is_current for group in self.groups):",
         "if False:", REGRESSIONS + "test_stale_gather"),
        # The side stream sends weights while the optimizer writes them.
        ("gather_before_the_shard_is_written",
         "            stream.wait_stream(schedule.device.current_stream())\n",
         "", REGRESSIONS + "test_streams_wait"),
        # A forward reads a buffer that is still being filled.
        ("compute_before_the_gather_has_ended",
         "            self.schedule.device.current_stream().wait_event(self.gathered_event)\n",
         "            pass\n", REGRESSIONS + "test_streams_wait"),
        # Compute waits for the reduction, and the reduction does not wait for the gradient.
        ("inverted_wait", "        stream.wait_stream(self.device.current_stream())\n        held",
         "        self.device.current_stream().wait_stream(stream)\n        held",
         REGRESSIONS + "test_streams_wait"),
        # Of two passes inside of a pass, the second's gradients come to a unit that has closed.
        ("second_pass_is_not_planned", "        if self._planned != task:",
         "        if self._planned is None:", PARITY + "test_recomputed_twice"),
        # A later unit's gradients overwrite one that is being reduced.
        ("gradient_buffer_released_too_early",
         "            current.wait_event(reduction.event)\n            reduction",
         "            reduction", REGRESSIONS + "test_streams_wait"),
        # A microbatch overwrites the sum of the one before.
        ("gradient_into_a_buffer_under_reduction", " if newest is not gradients else 0)",
         ")", REGRESSIONS + "test_streams_wait_for_each_strategy"),
        # Gradients of a unit that the last microbatch skips are added to the next step's.
        ("skipped_units_are_not_reduced", "                unit.reduce()\n",
         "                pass\n", "dist/test_gradients.py::test_a_unit_that_the_last_pass_skips"),
        # Memory grows with the number of layers.
        ("every_gradient_buffer_lives", "self.drain(keep=self.most_reductions - 1",
         "self.drain(keep=self.most_reductions + 9", REGRESSIONS + "test_gradient_buffers"),
        # Activation recompute gathers again, or releases what backward needs.
        ("recomputation_counts_as_forward",
         "    return bool(torch._C._current_graph_task_id() != -1)\n",
         "    return False\n", SCHEDULE + "test_recompute_gathers_each_unit_once"),
        # Between forward and backward a loop over parameters meets whole ones.
        ("kept_unit_shows_whole_parameters", "                        group.register_sharded()\n",
         "                        pass\n", INTERFACE + "test_as_torch"),
    ),
    *bugs_of(
        "param_group.py",
        # An optimizer's step goes unseen after a load that swaps parameters.
        ("swapped_parameters_are_loose", "        watch(self)  # what was swapped has lost",
         "        # what was swapped has lost", INTERFACE + "test_interface"),
        # A bias that was set to None, or swapped for a call, is computed with all the same.
        ("replaced_parameter_is_put_back",
         "            if any(m._parameters.get(name) is not self.sharded[index] for",
         "            if any(m._parameters is None for", INTERFACE + "test_interface"),
        # What load_state_dict assigns to a tied parameter's second name is overwritten.
        ("second_name_is_not_assigned",
         "next((p for p in held if p is not None and p is not parameter), parameter)",
         "next(held) or parameter", INTERFACE + "test_interface"),
        # Optimizers and tensor parallelism miss their marks on parameters.
        ("lost_attributes", "        setattr(twin, name, vars(source)[name])\n",
         "        pass\n", API + "test_marks_of_a_parameter_are_carried"),
        # Ranks read what another rank's result has overwritten.
        ("aliased_reduce_scatter_output", "outputs = [like.new_empty(size) for size in sizes]",
         "outputs = [nest.slice(like, 0, k + 1) for k in range(first, levels)]",
         REGRESSIONS + "test_reduction_output_is_other_memory"),
        # Loops over gradients pair different parameters over ranks, or hang.
        ("gradients_only_where_rows_are", "        home = self.main_grad if all(",
         "        wanted = [i for i in wanted if self.specs[i].local_numel]\n"
         "        home = self.main_grad if all(",
         "dist/test_fsdp_parity.py::test_loops_over_gradients"),
        # What the last user left between parameters reaches sums and norms.
        ("padding_is_reduced", "            full[start:stop].zero_()\n",
         "            pass\n", REGRESSIONS + "test_padding_leaks_nothing"),
        # A parameter off the path of the loss gets what lay in its buffer.
        ("absent_gradients_are_reduced",
         "            self._views[index].zero_()\n        self._copied = set()",
         "            pass\n        self._copied = set()",
         "unit/fsdp_core/fsdp/test_param_group.py"),
        # A fused gradient is counted by its kernel and again by autograd.
        ("double_accumulation", 'if getattr(parameter, "grad_added_to_main_grad", False):',
         "if False:", REGRESSIONS + "test_fused_accumulation"),
        # A kernel that read its orders in forward adds to memory that nobody zeroed.
        ("fused_kernel_adds_to_garbage", "                view.zero_()\n",
         "                pass\n", REGRESSIONS + "test_fused_accumulation"),
        # The learning rate is multiplied by the number of ranks.
        ("sum_in_place_of_the_mean", "        if scale != 1.0:",
         "        if False:", "dist/test_gradients.py::test_every_way_to_accumulate_gives_the_sum"),
        # A quotient of a sum in bf16 is rounded to bf16.
        ("quotient_in_the_dtype_of_the_sum",
         "            torch._foreach_copy_(targets, sources)\n",
         "            torch._foreach_mul_(sources, scale)\n"
         "            return torch._foreach_copy_(targets, sources)\n",
         "dist/test_gradients.py::test_a_sum_is_divided_in_the_dtype_of_the_gradient"),
        # A mean that float16 has is lost, because the sum is infinite.
        ("half_precision_overflows", "        if self._is_divided_twice:",
         "        if False:", PARITY + "test_large"),
        # A hook that clips gets sums over the ranks.
        ("hook_before_the_division", "if not (self.gives_sum or", "if not (True or",
         PARITY + "test_hooked"),
    ),
    *bugs_of(
        "row_sharded.py",
        # What is written into a view of a gathered copy is lost.
        ("views_are_of_copies", '        rule.refuse(" that it would view or write to")\n',
         "        pass\n",
         "unit/fsdp_core/fsdp/test_row_sharded.py"),
        # Fused optimizers are given tensors without elements.
        ("fused_kernels_see_empty_shards", "has = parameter.grad is not None and local.numel()",
         "has = parameter.grad is not None",
         OPTIMIZERS + "::test_a_step_over_rows_leaves_a_usual_optimizer"),
        # Where weights are kept in the compute dtype, training does not change them.
        ("copies_do_not_follow_the_optimizer", "                group.main_weight_changed()\n",
         "                pass\n", OPTIMIZERS),
    ),
    *bugs_of(
        "api.py",
        # A unit's gathered parameters or gradients are lost by wrapping around it.
        ("wrapped_in_flight", "    _check_at_rest(inner)\n",
         "", API + "test_refuses_to_wrap_around_a_unit_in_flight"),
        # Two units train two copies of a shared parameter.
        ("parameter_held_twice", "        if hasattr(parameter, _HELD):",
         "        if False:", API + "test_units_in_units_hold_each_parameter_once"),
        # A hook's collectives wait in the reductions' queue, not on the stream that was asked for.
        ("hook_runs_on_another_stream", "        with streams.stream(stream):\n",
         "        if stream:\n", INTERFACE + "test_interface"),
    ),
    *bugs_of(
        "layout.py",
        # ZeRO-1 reduces with every microbatch.
        ("optim_shards_gradients", "for least in (3, 2, 1))",
         "for least in (3, 1, 1))", SCHEDULE + "test_collectives_of_a_step"),
    ),
]  # fmt: skip

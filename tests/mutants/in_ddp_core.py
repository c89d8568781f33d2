"""Bugs in ``ddp_core``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

UNIT = "tests/unit"
COLLECTIVES = f"{UNIT}/test_collectives.py"
LAYOUT = f"{UNIT}/test_layout.py"
PLAN = f"{UNIT}/test_plan.py"
CORE = "tests/ddp/test_ddp_core.py"
PRECISION = "tests/ddp/test_ddp_precision.py"
STEPS = "tests/ddp/test_ddp_steps.py"

SAVED_BUCKETS = "tests/checkpoint/test_saved_buckets.py"
HOLD = "tests/ddp/test_ddp_hold.py"
ABANDONED = "tests/faults/test_ddp_abandoned.py"
PARALLEL = "tests/hosts/test_tensor_parallel.py"

MUTANTS: list[Mutant] = [
    *planted(
        "Streams.run",
        (
            "a stream's future completes with nothing, which nobody waits for",
            "future.set_result(task.result)",
            "future.set_result(None)",
            f"{UNIT}/test_deferred_streams.py::test_a_hook_gives_the_same_in_every_order",
        ),
        (
            "the next step does not wait for the commit of this one",
            "            self._follow(device)\n",
            "            pass\n",
            f"{UNIT}/test_deferred_streams.py::test_steps_that_are_under_way_together_share_no_memory",
        ),
    ),
    *planted(
        "Streams._side_stream",
        (
            "a side stream does not wait for the caller's",
            "side.wait_stream(module.current_stream(device))",
            "module.current_stream(device)",
            f"{UNIT}/test_deferred_streams.py::test_a_hook_gives_the_same_in_every_order",
        ),
        (
            "a step is committed without waiting for the other side stream",
            "        if task.joins:\n",
            "        if not task:\n",
            f"{UNIT}/test_deferred_streams.py"
            "::test_a_step_that_is_not_finite_or_ends_later_is_the_same_in_every_order",
        ),
    ),
    *planted(
        "Streams._exhaust",
        (
            "a stream does not wait for the collective",
            "                work.wait()\n",
            "",
            f"{UNIT}/test_deferred_streams.py::test_a_hook_gives_the_same_in_every_order",
        ),
    ),
    *planted(
        "StreamOrder.turn",
        (
            "streams that work on one tensor in turn do not wait for each other",
            "stream.wait_event(self._ends[device])",
            "pass",
            f"{UNIT}/test_deferred_streams.py::test_what_is_kept_moves_to_other_buckets_in_every_order",
        ),
    ),
    *planted(
        "record_stream",
        (
            "memory that another stream reads is given back",
            "tensor.record_stream(stream)",
            "pass",
            f"{UNIT}/test_deferred_hosts.py::test_a_caller_may_give_back_what_a_call_reads",
        ),
    ),
    *planted(
        "BucketPlan.rebuild",
        (
            "saved buckets are taken up by their order only",
            "order, buckets = self.arrival, saved.with_sparse(self._parameters)",
            "order = [index for one in saved.with_sparse(self._parameters) for index in one]\n"
            "            buckets = arrange(self._parameters, self.caps.limits, order=order)",
            f"{SAVED_BUCKETS}::test_our_class_goes_on_with_buckets_of_a_layout",
        ),
        (
            "what ranks could not agree on is forgotten",
            "        saved = self._usable_saved()\n",
            "        saved = self._usable_saved()\n        self._saved = None\n",
            f"{PLAN}::test_what_the_ranks_could_not_agree_on_is_kept",
        ),
    ),
    *planted(
        "BucketPlan.compare_loaded",
        (
            "buckets are laid out before the ranks have agreed on what they loaded",
            "            self._saved.agree()",
            "            pass",
            f"{SAVED_BUCKETS}::test_a_state_that_one_rank_has_loaded_names_the_others",
        ),
    ),
    *planted(
        "BucketPlan.request",
        (
            "other sizes of buckets are no reason to lay out anew",
            "if other_groups or (other_caps and self.settled):",
            "if other_groups:",
            f"{CORE}::test_a_hook_gets_buckets_of_the_size_it_asks_for",
        ),
    ),
    *planted(
        "BucketPlan.resume",
        (
            "an earlier state's order of gradients stays",
            "list(saved.arrival) if complete else []",
            "list(saved.arrival) if complete else self.arrival",
            f"{SAVED_BUCKETS}::test_the_last_state_that_is_loaded_decides",
        ),
        (
            "the saved order of gradients is lost",
            "self.arrival = list(saved.arrival) if complete else []",
            "self.arrival = []",
            f"{SAVED_BUCKETS}::test_our_class_lays_out_by_the_saved_order_of_gradients",
        ),
    ),
    *planted(
        "BucketPlan.step_ended",
        (
            "a static graph that goes on learns as if it began",
            "learns_only = self.static_graph and self.stage is Stage.NEW",
            "learns_only = self.static_graph and self._steps == 0",
            f"{SAVED_BUCKETS}::test_our_class_lays_out_by_the_saved_order_of_gradients",
        ),
    ),
    *planted(
        "BucketPlan._usable_saved",
        (
            "saved buckets win over a layout that was asked for after loading",
            "if saved is None or self._anew or not saved.holds(",
            "if saved is None or not saved.holds(",
            f"{SAVED_BUCKETS}::test_our_class_lays_out_by_the_saved_order_of_gradients",
        ),
        (
            "buckets of another size are taken up",
            "if saved.limits == self.caps.limits:",
            "if saved.limits:",
            f"{PLAN}::test_the_saved_order_decides_where_the_buckets_do_not_suit",
        ),
    ),
    *planted(
        "BucketPlan._for_splits",
        (
            "a rank that compiles nothing is not asked for buckets",
            "return self.settled and self.splits.open and self._steps > 0",
            "return bool(self.splits.buckets) and self.splits.open and self._steps > 0",
            "tests/ddp/test_ddp_compile.py::test_a_rank_without_inputs_joins_a_compiled_model",
        ),
    ),
    *planted(
        "BucketPlan._laid_out",
        (
            "the compiler's splits are laid out by the latest order",
            "order = self._order or self.arrival  # the splits are all that is new",
            "order = self.arrival",
            f"{PLAN}::test_a_compiled_run_that_goes_on_is_laid_out_by_the_order_of_the_first_step",
        ),
    ),
    *planted(
        "Backward._learn_static_graph",
        (
            "a static graph's gradients count as complete when their first part comes",
            "by_last_call = list(dict.fromkeys(reversed(step.hook_call_order)))[::-1]",
            "by_last_call = list(dict.fromkeys(step.hook_call_order))",
            f"{SAVED_BUCKETS}::test_a_static_graph_that_goes_on_takes_gradients_when_they_are_complete",
        ),
    ),
    *planted(
        "LocalGradients.gradient_came",
        (
            "an optimizer may step by gradients that are held",
            "            self._block_reason = self._block_reason or _HELD\n",
            "",
            f"{HOLD}::test_an_optimizer_refuses_gradients_that_are_held",
        ),
        (
            "local steps within no_sync are refused",
            "if self.in_hold or step.ready or not self.is_syncing():",
            "if self.in_hold or step.ready:",
            f"{HOLD}::test_a_pass_of_which_one_half_is_inside_is_an_error",
        ),
    ),
    *planted(
        "LocalGradients._first_with_gradient",
        (
            "an optimizer may not step after zero_grad",
            "if id(parameter) in name_of and parameter.grad is not None:",
            "if id(parameter) in name_of:",
            f"{HOLD}::test_an_optimizer_refuses_gradients_that_are_held",
        ),
    ),
    *planted(
        "LocalGradients.gradients_written",
        (
            "what was averaged counts as new",
            "self.has_new, self._landed = False, step",
            "self._landed = step",
            f"{HOLD}::test_a_second_reduce_is_an_error_on_all_ranks",
        ),
    ),
    *planted(
        "agree_on_reduce",
        (
            "each rank decides by itself whether there is something to reduce",
            "    if not ranks:\n",
            "    if not came:\n",
            f"{HOLD}::test_ranks_run_as_many_passes_as_they_like_and_nothing_travels_between",
        ),
        (
            "a parameter without gradient counts as zero",
            "    lacks = came and bool(gone)\n",
            "    lacks = False\n",
            f"{HOLD}::test_a_parameter_without_gradient_is_an_error_on_all_ranks",
        ),
    ),
    *planted(
        "reduce_at_point",
        (
            "a reduce that raises is not abandoned",
            "        exchange.abort()\n        raise\n",
            "        raise\n",
            f"{HOLD}::test_a_reduce_that_raises_is_a_step_that_was_abandoned",
        ),
    ),
    *planted(
        "Usage.finds_unused",
        (
            "a static graph asks nobody what was used before its first step",
            "return self.at_point and self.counts is None",
            "return False",
            f"{HOLD}::test_parameters_that_no_rank_uses_keep_their_gradient",
        ),
    ),
    *planted(
        "Reducer.prepare_for_backward",
        (
            "a trainer begins a step within hold",
            "if not self.backward.unreduced.in_hold:  # else it is a trainer's call",
            "if True:  # else it is a trainer's call",
            f"{HOLD}::test_a_pipeline_of_torchs_is_one_step_per_schedule",
        ),
    ),
    *planted(
        "Reducer.prepare_for_forward",
        (
            "a forward pass without backward makes the first held pass a step",
            "            self.exchange.step.expecting = False\n",
            "            pass\n",
            f"{HOLD}::test_a_forward_pass_without_backward_makes_no_held_pass_a_step",
        ),
    ),
    *planted(
        "ForwardPass.begin_step",
        (
            "buffers are not made equal after hold",
            "            state.buffers.sync_next = True  # whatever ran within `hold`\n",
            "            pass\n",
            f"{HOLD}::test_ranks_run_as_many_passes_as_they_like_and_nothing_travels_between",
        ),
    ),
    *planted(
        "SharedStore.call",
        (
            "a store that does not answer is waited for",
            "        if not call.done.wait(timeout_s):\n",
            "        if not call.done.wait(20 * timeout_s):\n",
            f"{UNIT}/test_shared_store.py::test_a_silent_store_is_waited_for_as_long_as_the_limit",
        ),
    ),
    *planted(
        "SharedStore.try_call",
        (
            "whoever waits for something else waits for a silent store again and again",
            "        if self.is_silent:\n            return None\n",
            "",
            f"{UNIT}/test_shared_store.py::test_a_silent_store_is_waited_for_as_long_as_the_limit",
        ),
    ),
    *planted(
        "verify_across_ranks",
        (
            "ranks that were built with other arguments train together",
            "    if text is not None:\n",
            "    if False:\n",
            f"{CORE}::test_ranks_that_were_built_differently_are_told",
        ),
    ),
    *planted(
        "module_facts",
        (
            "buffers are not compared",
            '"buffers to synchronise": _described(named) if syncs or taken else [],',
            '"buffers to synchronise": [],',
            f"{CORE}::test_ranks_that_were_built_differently_are_told",
        ),
    ),
    *planted(
        "LocalGradients.begin_averaging_pass",
        (
            "no_sync around backward alone is averaged",
            "            self._errors.only_backward()\n",
            "            pass\n",
            f"{HOLD}::test_a_pass_of_which_one_half_is_inside_is_an_error",
        ),
    ),
    *planted(
        "_exchange_zeros",
        (
            "a shadowed first step of a static graph counts as one of the others'",
            "        usage.join_static_graph()\n",
            "        usage.join_static_graph()\n        plan.stage = type(plan.stage).NEW\n",
            "tests/ddp/test_ddp_graphs.py"
            "::test_a_rank_that_is_idle_at_first_rebuilds_with_the_others",
        ),
    ),
    *planted(
        "AllReduce.combine",
        (
            "the mean sums before it divides",
            "tensors = [tensor * (1.0 / len(tensors)) for tensor in tensors]",
            "tensors = [torch.stack(list(tensors)).sum(0) / len(tensors)]",
            f"{COLLECTIVES}::test_the_mean_scales_before_it_sums",
        ),
    ),
    *planted(
        "AllGather.combine",
        (
            "gathered rows are in another order",
            "for rank in request.ranks or everyone])",
            "for rank in reversed(request.ranks or everyone)])",
            f"{COLLECTIVES}::test_all_gather_stacks_in_rank_order",
        ),
    ),
    *planted(
        "AllToAll.combine",
        (
            "an all-to-all gives every rank its own row",
            "results.append(torch.stack([requests[source].tensor[place] for source in ranks]))",
            "results.append(requests[rank].tensor.clone())",
            f"{COLLECTIVES}::test_all_to_all_transposes_ranks_and_rows",
        ),
    ),
    *planted(
        "AllReduce.wire_nbytes",
        (
            "an all-reduce is counted once",
            "return self.payload_nbytes * 2 * (world_size - 1) / world_size",
            "return self.payload_nbytes * (world_size - 1) / world_size",
            f"{COLLECTIVES}::test_bytes_follow_the_bandwidth_optimal_algorithm",
        ),
    ),
    *planted(
        "AllReduce.signature",
        (
            "what is reduced how is not compared",
            "return (*super().signature(), self.op)",
            "return super().signature()",
            f"{COLLECTIVES}::test_ranks_that_ask_for_different_things_are_told",
        ),
    ),
    *planted(
        "Broadcast.combine",
        (
            "a broadcast takes the first rank's",
            "value = requests[requests[0].source].tensor.clone()",
            "value = requests[0].tensor.clone()",
            f"{COLLECTIVES}::test_broadcast_overwrites_with_the_sources",
        ),
    ),
    *planted(
        "simulate",
        (
            "a rank that ends early is not noticed",
            "if requests and returned:",
            "if requests and len(returned) == len(ranks):",
            f"{COLLECTIVES}::test_a_rank_that_ends_early_is_told",
        ),
    ),
    *planted(
        "assign_buckets",
        (
            "a full bucket stays open",
            "if fill[kind] >= limits[min(position, len(limits) - 1)]:",
            "if fill[kind] > limits[min(position, len(limits) - 1)]:",
            f"{LAYOUT}::test_assignment_is_that_of_torch",
        ),
        (
            "every bucket has the first one's limit",
            "limits[min(position, len(limits) - 1)]",
            "limits[0]",
            f"{LAYOUT}::test_assignment_is_that_of_torch",
        ),
    ),
    *planted(
        "agree_on",
        (
            "every rank decides by itself whether buckets stay",
            "return agreed, bool(stays)",
            "return agreed, final",
            f"{CORE}::test_ranks_agree_on_the_first_ones_buckets",
        ),
        (
            "the last rank's buckets are everyone's",
            "dist.broadcast(message, group=group, group_src=0)",
            "dist.broadcast(message, group=group, group_src=group.size() - 1)",
            f"{CORE}::test_ranks_take_rank_0s_buckets",
        ),
    ),
    *planted(
        "arrange",
        (
            "the first step launches in registration order",
            "        return buckets[::-1]\n",
            "        return buckets\n",
            f"{LAYOUT}::test_first_step_takes_reverse_registration_order",
        ),
    ),
    *planted(
        "GradBucket.parameters",
        (
            "a bucket's parameters are its own list",
            "return list(self._parameters)",
            "return self._parameters",
            f"{UNIT}/test_bucket.py::test_changing_the_lists_it_returns_changes_nothing",
        ),
    ),
    *planted(
        "FlatBucket._scale",
        (
            "a whole bucket is not divided",
            "            self.buffer.mul_(1.0 / divisor)\n",
            "            pass\n",
            "tests/ddp/test_ddp_parity.py::test_twelve_steps_have_the_bits_of_torch",
        ),
    ),
    *planted(
        "UnusedGradients.in_bucket",
        (
            "a parameter that no rank uses is said to have been written",
            "if unused[slot] and not (used.in_views",
            "if False and not (used.in_views",
            f"{STEPS}::test_a_state_hears_which_gradients_were_not_written",
        ),
        (
            "a rank without inputs looks at its own gradients only",
            "used.in_views(index) if finds else bucket.is_in_view(slot)",
            "bucket.is_in_view(slot)",
            f"{STEPS}::test_a_rank_without_inputs_keeps_what_nobody_applies",
        ),
    ),
    *planted(
        "Precision.begin_forward",
        (
            "accumulated gradients are forgotten",
            "                parameter.data = data\n            self._full, self._versions",
            "                parameter.data, parameter.grad = data, None\n"
            "            self._full, self._versions",
            f"{PRECISION}::test_mixed_precision_accumulates_in_full_precision",
        ),
    ),
    *planted(
        "Precision.restore",
        (
            "parameters stay low",
            "                parameter.grad = None\n                parameter.data = data\n",
            "                parameter.grad = None\n",
            f"{PRECISION}::test_mixed_precision_computes_low_and_leaves_full_precision",
        ),
        (
            "updates of the low-precision copies are lost in silence",
            "if version_of(parameter) != version:",
            "if False:",
            f"{PRECISION}::test_an_update_of_the_low_copies_is_not_lost_in_silence",
        ),
    ),
    *planted(
        "Precision._user_gone",
        (
            "parameters stay low where no backward pass comes",
            "        if not is_nested() if after_backward else backward_number() == NO_BACKWARD:",
            "        if False:",
            f"{PRECISION}::test_mixed_precision_is_restored_where_no_backward_pass_ends",
        ),
    ),
    *planted(
        "DelayedAllReduce._adopt",
        (
            "a replaced gradient stays this rank's own",
            "if parameter.grad is not view:",
            "if False:",
            f"{STEPS}::test_delayed_parameters_are_averaged",
        ),
    ),
    *planted(
        "DelayedAllReduce._gradient_came",
        (
            "the trigger starts the all-reduce, whatever has come",
            "if self._triggered and len(self._arrived) == len(self._parameters):",
            "if self._triggered:",
            f"{STEPS}::test_delayed_parameters_are_averaged",
        ),
    ),
    *planted(
        "DDPState.change_group",
        (
            "a model goes to other ranks though its hook does not",
            "                self.replica.group = group_before\n",
            "                pass\n",
            "tests/checkpoint/test_other_ranks.py"
            "::test_what_cannot_change_says_why_and_stays_as_it_was",
        ),
    ),
    *planted(
        "Overlap.finish",
        (
            "what work raises is lost",
            "            raise self._error\n",
            "            pass\n",
            "tests/hook/test_lanes.py::test_work_that_fails_is_a_failure_of_the_scheme",
        ),
        (
            "work that no driver does is never done",
            "        self.run()\n        if self._error",
            "        if self._error",
            f"{UNIT}/test_overlap.py::test_work_is_done_once_whoever_drives_the_exchange",
        ),
    ),
    *planted(
        "Lanes._issue",
        (
            "an exchange goes on before its work is done",
            "            events.put(ticket)  # the work comes before the collective's own event\n",
            "            future.add_done_callback(lambda _: events.put(ticket))\n",
            "tests/hook/test_lanes.py::test_work_is_done_while_the_collective_is_under_way",
        ),
    ),
    *planted(
        "_drive",
        (
            "work waits for its collective",
            "                alive._run_overlap(event)",
            "                pass",
            "tests/hook/test_lanes.py::test_work_is_done_while_the_collective_is_under_way",
        ),
        (
            "closing leaves other ranks waiting",
            "done = stops and (alive is None or not alive._under_way)",
            "done = stops",
            "tests/hook/test_lanes.py"
            "::test_closing_ends_what_is_under_way_for_the_other_ranks_wait_for_it",
        ),
    ),
    *planted(
        "_discard",
        (
            "a group is dropped with a collective under way",
            "        left -= isinstance(events.get(), tuple)  # and not a ticket with work\n",
            "        left = 0\n",
            "tests/checkpoint/test_other_ranks.py"
            "::test_lanes_are_given_up_without_waiting_for_a_silent_rank",
        ),
        (
            "work counts as a collective that has ended",
            "left -= isinstance(events.get(), tuple)",
            "left -= events.get() is not None",
            "tests/unit/test_overlap.py"
            "::test_lanes_that_are_given_up_keep_their_groups_until_their_collectives_have_ended",
        ),
    ),
    *planted(
        "Lanes._fail_all",
        (
            "exchanges that were given up never end",
            "            task.abort()",
            "            pass",
            "tests/checkpoint/test_other_ranks.py"
            "::test_lanes_are_given_up_without_waiting_for_a_silent_rank",
        ),
    ),
    *planted(
        "replace_backward_optimizers",
        (
            "optimizers in backward also step with a rank's own gradient",
            "            handle.remove()\n",
            "            pass\n",
            f"{CORE}::test_optimizer_in_backward_steps_as_after_it_also_with_a_hook",
        ),
    ),
    *planted(
        "max_candidate_rank",
        (
            "everyone takes the model of the first that joined",
            "dist.all_reduce(choice, dist.ReduceOp.MAX, group=group)",
            "dist.all_reduce(choice, dist.ReduceOp.MIN, group=group)",
            "tests/ddp/test_ddp_graphs.py::test_uneven_inputs_with_every_option_and_buffer_hooks",
        ),
    ),
    *planted(
        "exchange_pairs",
        (
            "rows are stored as of another rank",
            "group.recv([_real(receive[place])]",
            "group.recv([_real(receive[(place + 1) % size])]",
            "tests/hook/test_pairs.py::test_rows_arrive_where_they_belong",
        ),
    ),
    *planted(
        "future_after",
        (
            "threads still have messages while the interpreter ends",
            "    _waiters.add(waiter)\n",
            "",
            "tests/hook/test_pairs.py::test_messages_are_dropped_before_the_interpreter_ends",
        ),
    ),
    *planted(
        "_DeviceClock.now",
        (
            "elapsed times count from the first moment for ever",
            "if host - self._origin_set > _ORIGIN_SECONDS:",
            "if False:",
            "tests/unit/test_on_cuda.py::test_moments_far_apart_are_as_exact",
        ),
    ),
    *planted(
        "Timestamp.seconds",
        (
            "times are read before the device has come there",
            "if origin is not None and self._event.query() and origin._event.query():",
            "if origin is not None:",
            "tests/unit/test_on_cuda.py"
            "::test_a_devices_times_are_of_its_work_and_known_when_it_has_done_it",
        ),
    ),
    *planted(
        "SparseSum._add",
        (
            "sparse parts are padded, and the padding is summed",
            "indices[rank, :count].t(),\n                values[rank, :count],",
            "indices[rank].t(),\n                values[rank].fill_(1),",
            "tests/ddp/test_sparse_sum.py::test_the_sum_is_gloos",
        ),
    ),
    *planted(
        "SparseBucket.fill",
        (
            "gradients that share their values are divided twice",
            "values.clone() if divisor is None else values / divisor",
            "values.clone() if divisor is None else values.div_(divisor)",
            "tests/ddp/test_sparse_sum.py"
            "::test_gradients_that_share_their_values_are_averaged_once",
        ),
    ),
    *planted(
        "Launcher._all_reduce",
        (
            "complex gradients are handed to a group as reals",
            "as_numbers(bucket.buffer, bucket.parameters[0])",
            "bucket.buffer",
            "tests/hosts/test_process_group.py::test_complex_numbers_travel_exactly",
        ),
    ),
    *planted(
        "Outcome.is_done",
        (
            "what is enqueued on a GPU counts as done",
            'if not self.future.done() or self.device.type == "cpu":',
            "if True:",
            "tests/unit/test_on_cuda.py::test_a_bucket_is_done_when_the_device_has_exchanged_it",
        ),
    ),
    *planted(
        "StoreBarrier.wait_for_all",
        (
            "the last rank that comes is waited for",
            "== self.size",
            "> self.size",
            f"{UNIT}/test_roll_call.py::test_all_come_again_and_again",
        ),
    ),
    *planted(
        "as_bytes",
        (
            "one entry of a strided tensor has no bytes",
            "    if flat.numel() <= 1:",
            "    if False:",
            f"{UNIT}/test_collectives.py::test_the_bytes_of_a_contiguous_tensor_are_its_memory",
        ),
    ),
    *planted(
        "AbortAgreement._outcome",
        (
            "a rank that dropped a step elsewhere goes on",
            "        if theirs != dropped:\n            return decide",
            "        if False:\n            return decide",
            f"{UNIT}/test_roll_call.py::test_only_ranks_that_have_dropped_alike_go_on",
        ),
    ),
    *planted(
        "AbortAgreement.poll",
        (
            "a rank that waits for another's dropped bucket waits on",
            "elif outcome is None and theirs[:2] <= (step - self.first_step, bucket):",
            "elif outcome is None and theirs[:2] < (0, 0):",
            f"{ABANDONED}::test_hooks_with_memory",
        ),
    ),
    *planted(
        "AbortAgreement.agree",
        (
            "dropped steps stay in the store",
            "                    before.delete_keys()\n",
            "                    pass\n",
            f"{ABANDONED}::test_ranks_that_raise_alike_go_on_again_and_again",
        ),
    ),
    *planted(
        "AbortAgreement.record",
        (
            "a rank that came to the others counts all its steps",
            "_AbortedStep(step - self.first_step, launched, from_peer)",
            "_AbortedStep(step, launched, from_peer)",
            f"{ABANDONED}::test_another_process_group_is_a_new_beginning",
        ),
    ),
    *planted(
        "DeviceWatchdog.poll",
        (
            "the group is aborted and the loop goes on",
            "        _raise_in(pending.thread, self._error)\n",
            "",
            "tests/hook/test_cuda_emulation.py"
            "::test_whoever_waits_for_the_gpu_hears_of_a_rank_that_has_failed",
        ),
        (
            "a step that the GPU has done is looked up all the same",
            "if pending.is_over is not None and self._query(pending.is_over):",
            "if False:",
            "tests/hook/test_cuda_emulation.py::test_a_step_that_nobody_waits_for_is_left_alone",
        ),
    ),
    *planted(
        "localize",
        (
            "a parameter that modules share becomes two",
            "if id(parameter) not in locals_of:",
            "if True:",
            f"{PARALLEL}::test_shared_uneven_and_frozen_parameters_stay_what_they_are",
        ),
        (
            "frozen shards are trained",
            "nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)",
            "nn.Parameter(parameter.to_local().detach())",
            f"{PARALLEL}::test_shared_uneven_and_frozen_parameters_stay_what_they_are",
        ),
        (
            "DTensors of a forward pass that raised stay",
            "always_call=True",
            "always_call=False",
            f"{PARALLEL}::test_a_forward_pass_that_raised_leaves_no_old_tensors",
        ),
    ),
    *planted(
        "_distributed",
        (
            "all shards count as equally large",
            "        shape=spec.shape,\n        stride=spec.stride,\n",
            "",
            f"{PARALLEL}::test_shared_uneven_and_frozen_parameters_stay_what_they_are",
        ),
    ),
    *planted(
        "_save",
        (
            "a model of shards is saved as plain tensors",
            "state[prefix + place.name] = _distributed(local, place.spec)",
            "state[prefix + place.name] = local",
            f"{PARALLEL}::test_a_checkpoint_is_the_same_on_every_mesh",
        ),
    ),
    *planted(
        "_distributed_state.distributed",
        (
            "moments of shards are saved as plain tensors",
            "            return _distributed(value, spec)\n        if value.numel()",
            "            return value\n        if value.numel()",
            f"{PARALLEL}::test_a_checkpoint_is_the_same_on_every_mesh",
        ),
    ),
    *planted(
        "_shard_of",
        (
            "every rank takes the first piece of a whole tensor",
            "value = value.narrow(dim, min(begin, value.shape[dim]), size)",
            "value = value.narrow(dim, 0, size)",
            f"{PARALLEL}::test_a_checkpoint_is_the_same_on_every_mesh",
        ),
    ),
    *planted(
        "_step_begins",
        (
            "an optimizer keeps DTensors that it loaded before its first step",
            "        _load_state(optimizer)  # what was loaded",
            "        pass  # what was loaded",
            f"{PARALLEL}::test_files_of_each_rank_load_with_shards_or_dtensors",
        ),
    ),
    *planted(
        "DistributedDataParallel.reduce",
        (
            "delayed parameters are left out of a reduce",
            "            if state.delayed is not None:\n                state.delayed.reduce()\n",
            "",
            f"{HOLD}::test_delayed_parameters_are_averaged_too",
        ),
        (
            "reduce ends hold",
            "                    self._set_holding(held)\n",
            "                    pass\n",
            f"{HOLD}::test_passes_after_reduce_within_hold_are_held",
        ),
    ),
    *planted(
        "reduce_at_point",
        (
            "a rank whose gradients were dropped has something to reduce",
            "came = unreduced.has_new and len(missing) < len(exchange.parameters)",
            "came = unreduced.has_new",
            f"{HOLD}::test_a_second_reduce_is_an_error_on_all_ranks",
        ),
    ),
    *planted(
        "DelayedAllReduce._all_reduce",
        (
            "delayed gradients are summed",
            "        self._buffer.div_(self.group.size())\n",
            "",
            f"{STEPS}::test_delayed_parameters_are_averaged",
        ),
    ),
    *planted(
        "ReduceScatter.combine",
        (
            "simulated ranks scatter the first rank's part to all",
            "[total[rank].clone() for rank in range(len(requests))]",
            "[total[0].clone() for rank in range(len(requests))]",
            f"{UNIT}/test_shard_collectives.py::test_each_rank_gets_its_part_of_the_mean_with_one_rounding",
        ),
    ),
    *planted(
        "AllReduce.issue",
        (
            "a mean of three ranks has other bits than torch's",
            "self.tensor.mul_(1.0 / group.size())",
            "self.tensor.div_(group.size())",
            "tests/hosts/test_every_host.py"
            "::test_without_a_scheme_hosts_and_calls_give_their_own_bits[3]",
        ),
    ),
    *planted(
        "ReduceScatter.issue",
        (
            "a mean is scattered as a sum",
            'op = dist.ReduceOp.AVG if self.op == "mean" else dist.ReduceOp.SUM',
            "op = dist.ReduceOp.SUM",
            "tests/fsdp/test_fsdp2.py::test_none_has_the_bits_of_fsdp2_itself[plain]",
        ),
    ),
    *planted(
        "StepExchange.begin",
        (
            "futures of buffer hooks are kept for ever",
            "            self._effective, self._futures = None, []\n",
            "            self._effective = None\n",
            "tests/ddp/test_ddp_parity.py"
            "::test_a_scenario_ends_with_the_bits_of_torch[buffer-hook-after]",
        ),
    ),
    *planted(
        "StepExchange.send",
        (
            "a bucket is the last one where another one follows",
            "not any(needed[bucket.number + 1 :])",
            "not any(needed[bucket.number + 2 :])",
            f"{UNIT}/test_bucket.py::test_the_last_bucket_that_is_sent_is_told_so",
        ),
    ),
    *planted(
        "FlatBucket._scale",
        (
            "views are not divided where others are copied",
            "        if in_place:\n            foreach_divide",
            "        if not copies:\n            foreach_divide",
            f"{UNIT}/test_bucket.py::test_a_bucket_of_views_and_copies_is_divided_once",
        ),
    ),
]

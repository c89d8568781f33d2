"""Bugs in the wrappers, the engine, checkpoints and the rest of ``commhooks``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

UNIT = "tests/unit"
LAWS = "tests/contract/test_conformance.py::test_registered_schemes_obey_every_law"
FEEDBACK = f"{UNIT}/test_references_feedback.py"
LOW_RANK = f"{UNIT}/test_low_rank_schemes.py"
POLICIES = f"{UNIT}/test_references_policies.py"
WRAPPERS = f"{UNIT}/test_wrappers.py"
MEMORY = f"{UNIT}/test_memory.py"
CHECKPOINT = f"{UNIT}/test_checkpoint.py"
WORLD = "tests/checkpoint/test_other_ranks.py"
FUNCTIONS = "tests/hosts/test_functions.py"
GROUP = "tests/hosts/test_process_group.py"

MUTANTS: list[Mutant] = [
    *planted(
        "_completed",
        (
            "half of the residual is lost",
            "torch.sub(bucket.gradient, sent, out=bucket.unsent)",
            "torch.sub(bucket.gradient, sent, out=bucket.unsent).mul_(0.5)",
            f"{WRAPPERS}::test_the_residual_is_what_was_not_sent",
        ),
    ),
    *planted(
        "Bucket.replace",
        (
            "another place for the rest shares the sum",
            'if changes.keys() & {"raw", "residual", "unsent"}:',
            'if changes.keys() & {"raw", "residual"}:',
            f"{UNIT}/test_scheme_bucket.py::test_another_place_for_the_rest_makes_another_gradient",
        ),
    ),
    *planted(
        "ExchangeLauncher.start_groups",
        (
            "held buckets are released without waiting for streams",
            ").then(group.release)  #",
            ").add_done_callback(group.release)  #",
            "tests/unit/test_deferred_streams.py::test_a_hook_gives_the_same_in_every_order",
        ),
        (
            "every part of a bucket that is cut ends the step",
            "is_last=is_last and position == len(groups) - 1,",
            "is_last=is_last,",
            "tests/hook/test_cut_buckets.py::test_parts_outside_of_backward_are_one_step",
        ),
    ),
    *planted(
        "Group.cut",
        (
            "a bucket is cut too late by one parameter",
            "if filled + size > most:",
            "if filled > most:",
            "tests/hook/test_cut_buckets.py::test_a_large_parameter_is_a_part_of_its_own",
        ),
    ),
    *planted(
        "Runner.settle",
        (
            "an inner backward pass ends the step",
            "if step.in_outer_pass and not step.core_notifies:",
            "if step.in_outer_pass:",
            "tests/ddp/test_ddp_steps.py"
            "::test_a_step_that_raises_after_an_inner_pass_is_no_step_on_any_rank",
        ),
    ),
    *planted(
        "HookBucket.of",
        (
            "buckets are known by their address",
            "StorageWeakRef(buffer.untyped_storage())",
            "buffer.data_ptr()",
            "tests/checkpoint/test_saved_buckets.py"
            "::test_the_saved_layout_is_that_of_the_buckets_that_were_rebuilt",
        ),
    ),
    *planted(
        "HookTarget.may_skip_unused",
        (
            "a host without gradients leaves all parameters alone",
            "return isinstance(bucket, dist.GradBucket)  #",
            "return True  #",
            "tests/hook/test_steps.py"
            "::test_a_host_whose_parameters_have_no_gradients_keeps_its_residuals",
        ),
        (
            "a state of the inner module takes every gradient for arrived",
            "return isinstance(bucket, dist.GradBucket)  #",
            "return False  #",
            "tests/ddp/test_ddp_steps.py"
            "::test_a_state_of_the_inner_module_keeps_what_nobody_applies",
        ),
    ),
    *planted(
        "SavedBucketLayout.apply",
        (
            "our class does not start from the saved buckets",
            "        core.restore_layout(members,",
            "        print(members,",
            "tests/checkpoint/test_saved_buckets.py::test_our_class_goes_on_in_the_saved_buckets",
        ),
        (
            "our class travels in the loaded layout whatever its buckets are",
            "regroups=core is None)",
            "regroups=True)",
            "tests/checkpoint/test_saved_buckets.py"
            "::test_our_class_lays_out_by_the_saved_order_of_gradients",
        ),
    ),
    *planted(
        "Scaled.exchange",
        (
            "Scaled keeps what its codec kept",
            "unsent = result.unsent.mul_(factor).add_(bucket.raw, alpha=1.0 - factor)",
            "unsent = result.unsent.add_(bucket.raw, alpha=0.0)",
            f"{FEEDBACK}::test_scaled_sends_a_share_and_keeps_the_rest",
        ),
    ),
    *planted(
        "_pop_residual",
        (
            "a residual is flushed in every step",
            "    bucket.memory.write(RESIDUAL, bucket.layout, None)\n",
            "",
            f"{WRAPPERS}::test_flush_adds_the_residual_once",
        ),
    ),
    *planted(
        "EF21.exchange",
        (
            "EF21's total is not committed",
            "        bucket.write(_TOTAL, total)\n",
            "",
            f"{FEEDBACK}::test_ef21_of_topk",
        ),
        (
            "EF21 books 2 % less than it sent",
            "torch.add(estimate, sent, out=",
            "torch.add(estimate, sent, alpha=0.98, out=",
            f"{FEEDBACK}::test_ef21_of_topk",
        ),
        (
            "EF21's momentum has its weights swapped",
            "torch.lerp(target, old, self.momentum, out=new)",
            "torch.lerp(old, target, self.momentum, out=new)",
            f"{FEEDBACK}::test_ef21_of_topk",
        ),
    ),
    *planted(
        "AveragedFeedback.exchange",
        (
            "the averaged error is reset a step late",
            "if self.reset_every and (bucket.step + 1) % self.reset_every == 0:",
            "if self.reset_every and bucket.step % self.reset_every == 0:",
            f"{FEEDBACK}::test_averaged_feedback",
        ),
        (
            "the averaged error has its weights swapped",
            "error.mul_(self.decay).add_(result.unsent, alpha=1 - self.decay)",
            "error.mul_(1 - self.decay).add_(result.unsent, alpha=self.decay)",
            f"{FEEDBACK}::test_averaged_feedback",
        ),
    ),
    *planted(
        "PeriodicDense.exchange",
        (
            "a periodic dense step keeps the residual back",
            "            pop_residual(bucket)\n",
            "            pass\n",
            f"{POLICIES}::test_periodic_dense_sends_what_was_held_back_in_every_third_step",
        ),
        (
            "a periodic dense step comes a step late",
            "if (bucket.step + 1) % self.every:",
            "if bucket.step % self.every:",
            f"{POLICIES}::test_periodic_dense_sends_what_was_held_back_in_every_third_step",
        ),
    ),
    *planted(
        "DelayedStart.exchange",
        (
            "a delayed start is a step late",
            "if bucket.step < self.start_step else",
            "if bucket.step <= self.start_step else",
            f"{POLICIES}::test_delayed_start_is_dense_and_then_the_scheme",
        ),
    ),
    *planted(
        "Schedule.at",
        (
            "a schedule's part begins a step late",
            "if begin <= step][-1]",
            "if begin < max(step, 1)][-1]",
            f"{UNIT}/test_policies.py::test_a_schedule_runs_each_part_in_its_steps",
        ),
    ),
    *planted(
        "Guard._judge",
        (
            "the guard rests a step less",
            "bucket.step + 1 + _REST",
            "bucket.step + _REST",
            f"{POLICIES}::test_the_guard_goes_dense_for_as_long_as_it_says_and_flushes",
        ),
    ),
    *planted(
        "Guard.exchange",
        (
            "the guard does not send what was held back",
            "                pop_residual(bucket)\n",
            "                pass\n",
            f"{POLICIES}::test_the_guard_goes_dense_for_as_long_as_it_says_and_flushes",
        ),
    ),
    *planted(
        "PackedCodec._gather_whole",
        (
            "the gathered mean of five ranks is of six",
            "gathered, shards, 0, bucket.output, random, 1.0 / bucket.world_size",
            "gathered, shards, 0, bucket.output, random, "
            "1.0 / (bucket.world_size + (bucket.world_size == 5))",
            f"{FEEDBACK}::test_topk_with_feedback",
        ),
    ),
    *planted(
        "spans",
        (
            "the last entry is dropped where it begins a unit",
            "min((i + 1) * length, n))",
            "min((i + 1) * length, n - (n % unit == 1)))",
            "tests/unit/test_shard_collectives.py::test_shards_cover_a_bucket",
        ),
    ),
    *planted(
        "PackedCodec.all_gather",
        (
            "a gathered shard is rounded with the first phase's bits",
            'inside, random = bucket.in_float32(), Randomness(bucket, "server")',
            'inside, random = bucket.in_float32(), Randomness(bucket, "worker")',
            f"{UNIT}/test_shard_collectives.py::test_the_two_halves_are_the_whole_exchange_bit_for_bit",
        ),
        (
            "a short shard is decoded as a full one",
            "alike = shards.segments is not None or (",
            "alike = True or (",
            f"{UNIT}/test_shard_collectives.py::test_all_ranks_get_the_same_parts_of_all_with_one_rounding",
        ),
    ),
    *planted(
        "to_shards",
        (
            "blocks have entries of several parameters",
            "cut = layout.cut(parts) if known and layout is not None else",
            "cut = [(end - at,) for at, end in parts] if known else",
            f"{LAWS}[int8]",
        ),
    ),
    *planted(
        "PackedCodec.reduce_scatter",
        (
            "parts that kernels do not cut are packed by them",
            "cut_as_kernels = shards.segments is not None or",
            "cut_as_kernels = True or",
            f"{UNIT}/test_shard_collectives.py::test_each_rank_gets_its_part_of_the_mean_with_one_rounding",
        ),
    ),
    *planted(
        "Payloads.repack_shard",
        (
            "the mean of a shard is of one rank more",
            "            factor = 1.0 / len(rows)\n",
            "            factor = 1.0 / (len(rows) + 1)\n",
            f"{UNIT}/test_hierarchical.py::test_sixteen_bits_round_stochastically",
        ),
        (
            "the second rounding's loss is one rank's share",
            "unsent[begin:end].add_(error, alpha=float(weight))",
            "unsent[begin:end].add_(error)",
            "tests/contract/test_laws.py"
            "::test_applied_and_residual_sum_to_the_gradients_in_any_buckets",
        ),
    ),
    *planted(
        "Randomness.noise",
        (
            "all ranks round with the same noise",
            'return self._bits(f"{self._phase}/0", shared=False)',
            'return self._bits(f"{self._phase}/0", shared=True)',
            f"{UNIT}/test_shard_collectives.py"
            "::test_random_roundings_of_equal_gradients_average_out_over_ranks",
        ),
        (
            "noise is the same on every rank",
            'return self._bits(f"{self._phase}/0", shared=False)',
            'return self._bits(f"{self._phase}/0", shared=True)',
            "tests/unit/test_quantized.py::test_two_phases_cost_what_their_law_says",
        ),
    ),
    *planted(
        "Randomness._bits",
        (
            "all shards round with the same noise",
            "return bits.row(self._index) if self._index else bits",
            "return bits",
            f"{UNIT}/test_eden.py::test_two_phases_round_twice_and_independently",
        ),
    ),
    *planted(
        "Randomness.per_phase",
        (
            "both phases rotate alike",
            'return self.shared if self._phase == "worker" else',
            "return self.shared if self._phase else",
            f"{UNIT}/test_eden.py::test_two_phases_round_twice_and_independently",
        ),
    ),
    *planted(
        "Hierarchical.exchange",
        (
            "what a node loses is one rank's share",
            "            error.mul_(float(local))\n",
            "            pass\n",
            f"{FEEDBACK}::test_sdp4bit",
        ),
    ),
    *planted(
        "Codec.exchange",
        (
            "a codec's mean is of one rank more",
            "mean.add_(decoded, alpha=1.0 / world_size)",
            "mean.add_(decoded, alpha=1.0 / (world_size + 1))",
            "tests/contract/test_conformance.py::test_the_base_of_the_planted_defects_is_right",
        ),
    ),
    *planted(
        "Cast._narrow",
        (
            "a cast narrows before it divides",
            "scaled_cast(request.tensor, 1.0 / scale, out=small)",
            "small.copy_(request.tensor).mul_(1.0 / scale)",
            f"{WRAPPERS}::test_a_cast_divides_before_it_narrows",
        ),
    ),
    *planted(
        "Cast._cast",
        (
            "a sum arrives as a mean after a cast",
            "1.0 if _is_mean(request) else scale",
            "1.0",
            f"{UNIT}/test_scheme_bucket.py::test_a_cast_multiplies_a_sum_back",
        ),
        (
            "a residual within two casts misses the second rounding",
            "request.overlap.after(rounded)",
            "request.overlap",
            f"{WRAPPERS}::test_feedback_knows_what_a_cast_rounds",
        ),
        (
            "feedback is told a rank's share, not its whole",
            "request.sent = narrow.tensor.to(tensor.dtype).mul_(scale)",
            "request.sent = narrow.tensor.to(tensor.dtype)",
            "tests/contract/test_laws.py"
            "::test_applied_and_residual_sum_to_the_gradients_in_any_buckets[powersgd-fp16_feedback]",
        ),
    ),
    *planted(
        "PerParameter.exchange",
        (
            "rules leave another scheme's residual behind",
            "schemes = [with_flush(scheme) for scheme in schemes]",
            "schemes = list(schemes)",
            f"{WRAPPERS}::test_rules_flush_the_residual_of_parameters_without_feedback",
        ),
    ),
    *planted(
        "PerParameter.choose",
        (
            "the last rule that matches decides",
            "(rule.scheme for rule in self.rules if",
            "(rule.scheme for rule in reversed(self.rules) if",
            f"{WRAPPERS}::test_the_first_rule_that_matches_decides",
        ),
    ),
    *planted(
        "FlatValues.collect",
        (
            "a warm start is lost when buckets change",
            "if old is not None and old.shape == view.shape:",
            'if old is not None and old.shape == view.shape and not key.endswith(".q"):',
            f"{LOW_RANK}::test_factors_and_residuals_move_on_to_other_buckets",
        ),
    ),
    *planted(
        "Memory.commit",
        (
            "a GPU's bad step is remembered",
            "        restore(replaced, good)\n",
            "        pass\n",
            f"{UNIT}/test_memory.py"
            "::test_a_verdict_on_the_device_keeps_what_was_there_without_a_read",
        ),
        (
            "a parameter that was left alone at first remembers anything",
            "            if new := absent.get((key, layout)):\n",
            "            if new := []:\n",
            f"{UNIT}/test_memory.py"
            "::test_a_parameter_left_alone_at_first_begins_with_its_initial_value",
        ),
        (
            "a bad step is remembered",
            "if on_host and not good.item():",
            "if False:",
            f"{MEMORY}::test_a_bad_step_and_one_that_is_dropped_change_nothing",
        ),
        (
            "the next scratch is what is remembered",
            "                self._kept.spare[key, layout] = old\n",
            "                self._kept.spare[key, layout] = flat\n",
            f"{MEMORY}::test_scratch_is_never_a_live_tensor",
        ),
        (
            "parameters that no rank uses lose their residual",
            "        if unused:\n            absent = {",
            "        if False:\n            absent = {",
            "tests/hook/test_steps.py"
            "::test_applied_and_residual_sum_to_the_gradients_of_the_steps_counted",
        ),
    ),
    *planted(
        "_verdicts",
        (
            "the last bucket decides for all",
            "torch.stack(group).all() for group",
            "group[-1] for group",
            "tests/contract/test_laws.py::test_a_bad_bucket_keeps_the_memory_of_the_whole_step",
        ),
        (
            "devices decide each for itself",
            'torch.stack([good.to(to, non_blocking=to.type != "cpu") for good in verdicts]).all()',
            "verdicts[devices.index(to)]",
            f"{UNIT}/test_on_cuda.py::test_the_verdict_is_brought_together_on_every_device",
        ),
    ),
    *planted(
        "Engine",
        (
            "an abandoned step is not dropped",
            "        with self._lock:\n            self._open = None\n\n    def bucket",
            "        with self._lock:\n            pass\n\n    def bucket",
            "tests/hook/test_steps.py::test_a_step_whose_backward_raised_is_dropped",
        ),
    ),
    *planted(
        "Engine._settle",
        (
            "a step is over before its last bucket",
            "if not step.closed or step.finished < len(step.launched):",
            "if not step.closed:",
            f"{UNIT}/test_engine.py"
            "::test_an_abandoned_step_that_finishes_late_does_not_end_the_next_one",
        ),
    ),
    *planted(
        "CollectiveCall.exchange",
        (
            "a tensor of inference mode is reduced in its own memory",
            "raw.clone() if raw.is_inference() else raw",
            "raw",
            f"{FUNCTIONS}::test_tensors_of_inference_mode_are_written_in_and_outside_of_it",
        ),
        (
            "a tensor with gaps does not get the result",
            "write_into(into, arrived.view(into.shape))",
            "pass",
            f"{FUNCTIONS}::test_tensors_of_any_kind_are_reduced_in_place",
        ),
    ),
    *planted(
        "_times.total",
        (
            "a sum is a mean",
            "mean = result.mean.mul_(ranks) if in_output else result.mean * ranks",
            "mean = result.mean",
            f"{FUNCTIONS}::test_an_all_reduce_of_every_scheme_is_what_its_hook_gives",
        ),
    ),
    *planted(
        "CollectiveState._start",
        (
            "every call is the first one of its name",
            "self._steps[name] = at + 1",
            "self._steps[name] = at",
            f"{FUNCTIONS}::test_each_call_draws_other_bits",
        ),
        (
            "ranks do not agree on what their parts were like",
            'engine, agree = self._engine_at(at), keeps and call.kind == "reduce_scatter"',
            "engine, agree = self._engine_at(at), False",
            f"{FUNCTIONS}::test_a_call_that_is_not_finite_on_one_rank_changes_no_memory_on_any",
        ),
    ),
    *planted(
        "CollectiveState._engine_at",
        (
            "groups whose means are averaged again have the draws of the second average",
            "            if len(ranks) < dist.get_world_size():",
            "            if not ranks:",
            f"{FUNCTIONS}::test_means_of_means_are_unbiased",
        ),
        (
            "each group of ranks draws by itself",
            "apart = [rank - ranks[0] for rank in ranks]",
            "apart = ranks",
            f"{FUNCTIONS}::test_means_of_means_are_unbiased",
        ),
    ),
    *planted(
        "CollectiveState.load_state_dict",
        (
            "a resumed run counts the steps of each tensor anew",
            "self._steps, self._first_step = steps, self.step if first is None else first",
            "self._steps, self._first_step = {}, self.step",
            f"{FUNCTIONS}::test_saved_and_loaded_calls_go_on_bit_for_bit",
        ),
    ),
    *planted(
        "close_idle",
        (
            "what was made for a destroyed group stays",
            "for collectives in _made.pop(group).values():",
            "for collectives in _made[group].values():",
            f"{FUNCTIONS}::test_functions_use_what_they_made_until_its_group_is_destroyed",
        ),
    ),
    *planted(
        "SchemeGroup._set_group_name",
        (
            "a group renames the group inside",
            "        self._name = name\n",
            "        super()._set_group_name(name)\n        self._name = name\n",
            f"{GROUP}::test_all_but_large_sums_of_floats_passes_as_it_is",
        ),
    ),
    *planted(
        "_can_average",
        (
            "the largest of numbers is averaged",
            "mean = op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG",
            "mean = True",
            f"{GROUP}::test_all_but_large_sums_of_floats_passes_as_it_is",
        ),
    ),
    *planted(
        "SchemeGroup._scatter",
        (
            "a reduce-scatter is as large as its output",
            "if input.numel() < self.least:",
            "if output.numel() < self.least:",
            f"{GROUP}::test_a_reduce_scatter_that_is_not_compressed_is_told_once",
        ),
    ),
    *planted(
        "_reduced_by_scheme.method",
        (
            "what fully_shard reduces over a group travels as it is",
            "done, handle = self._scatter(output, input, opts)",
            "done, handle = False, None",
            f"{GROUP}::test_fully_shard_over_a_group_is_compressed",
        ),
    ),
    *planted(
        "SchemeGroup.allreduce",
        (
            "small tensors are compressed",
            "or tensors[0].numel() < self.least:",
            "or tensors[0].numel() < 2:",
            f"{GROUP}::test_all_but_large_sums_of_floats_passes_as_it_is",
        ),
    ),
    *planted(
        "_is_real",
        (
            "complex numbers that torch hands over as pairs are compressed",
            "pairs = tensor.shape[-1:] == (2,) or",
            "pairs = False or",
            f"{GROUP}::test_complex_numbers_travel_exactly",
        ),
        (
            "complex numbers of a reducer's flat bucket are compressed",
            "(base is not None and base.is_complex())",
            "False",
            f"{GROUP}::test_complex_numbers_travel_exactly",
        ),
    ),
    *planted(
        "handshake_fields",
        (
            "the handshake does not look at node sizes",
            "for fact in inside.environment(engine.world_size)",
            "for fact in ()",
            "tests/hook/test_pairs.py::test_ranks_that_count_nodes_differently_are_told",
        ),
    ),
    *planted(
        "apply",
        (
            "a loaded hook draws by its own seed",
            'engine.step, engine.seed = loaded.common["step"], loaded.common["seed"]',
            'engine.step = loaded.common["step"]',
            "tests/hosts/test_functions.py::test_saved_and_loaded_calls_go_on_bit_for_bit",
        ),
    ),
    *planted(
        "_carry_over",
        (
            "what a rank keeps weighs by the new number of ranks twice",
            "merged(parts, rank, saved_size, change.world_size, resizes)",
            "merged(parts, rank, change.world_size, change.world_size, resizes)",
            f"{WORLD}::test_four_ranks_become_two_and_then_three[core]",
        ),
        (
            "a rank that joins keeps what it had",
            "    for number in stayed:\n",
            "    for number in range(change.world_size):\n",
            f"{WORLD}::test_a_rank_that_was_away_for_a_change_joins_as_a_new_one",
        ),
        (
            "estimates keep the mean of those that are left",
            "    if change.lost:\n        # The mean",
            "    if False:\n        # The mean",
            f"{WORLD}::test_ranks_go_on_without_one_that_died",
        ),
    ),
    *planted(
        "_exchange",
        (
            "shared values do not go to a rank that joins",
            "sent |= {key for key in memory_here if key not in resizes}",
            "sent |= set()",
            f"{WORLD}::test_four_ranks_become_two_and_then_three[core]",
        ),
    ),
    *planted(
        "_resume",
        (
            "a rank goes on with its own seed",
            'engine.step, engine.seed = source.step, given["seed"]',
            "engine.step = source.step",
            f"{WORLD}::test_four_ranks_become_two_and_then_three[core]",
        ),
        (
            "a rank that joins has buckets of its own",
            'bool(change.joined or change.stale_ranks or given["regroups"])',
            'bool(given["regroups"])',
            f"{WORLD}::test_a_verified_run_goes_on_to_be_verified",
        ),
        (
            "a hook keeps its place among the ranks before",
            "engine.rank, engine.world_size = group.rank(), group.size()",
            "engine.world_size = group.size()",
            f"{WORLD}::test_four_ranks_become_two_and_then_three[core]",
        ),
    ),
    *planted(
        "_surviving_ranks",
        (
            "the largest step decides who goes on",
            "            len(same_run(ranks[rank])),\n            ranks[rank].world_size,\n",
            "",
            f"{WORLD}::test_a_rank_with_a_larger_step_joins_all_the_same",
        ),
        (
            "a rank that was away goes on with what was counted as lost",
            "if ranks[rank].step >= last - 1]",
            "if ranks[rank].step >= 0]",
            f"{WORLD}::test_a_rank_that_was_away_for_a_change_joins_as_a_new_one",
        ),
    ),
    *planted(
        "change_group",
        (
            "the ranks before are given up after the change, not before",
            "        hook.drivers.abort()\n",
            "        pass\n",
            f"{WORLD}::test_ranks_go_on_without_one_that_died[topk-False-group-torch]",
        ),
        (
            "verification stays with the ranks before",
            "            hook.verification.abort()",
            "            pass",
            f"{WORLD}::test_ranks_go_on_without_one_that_died",
        ),
    ),
    *planted(
        "_check_between_steps",
        (
            "ranks change in the middle of a step",
            "    if step is not None and step.backward_ids:",
            "    if False:",
            f"{WORLD}::test_what_cannot_change_says_why_and_stays_as_it_was",
        ),
    ),
    *planted(
        "HookTarget.adopt",
        (
            "a group that was given is not compared with the model's",
            "self._follows_model = self._process_group is model.process_group",
            "self._follows_model = False",
            f"{WORLD}::test_a_model_that_moved_alone_raises_until_its_hook_follows",
        ),
    ),
    *planted(
        "_QuorumHook.start",
        (
            "a replica that recovers counts",
            "self._hook.world_size / manager.num_participants()",
            "1.0",
            "tests/hosts/test_torchft.py::test_a_hook_follows_the_quorum",
        ),
        (
            "a step with an error is kept",
            "self._hook.step_aborted()  #",
            "pass  #",
            "tests/hosts/test_torchft.py::test_a_hook_follows_the_quorum",
        ),
    ),
    *planted(
        "merged",
        (
            "fewer ranks apply what was owed twice over",
            "values[key] = _added(key, memories, world_size / saved_size)",
            "values[key] = _added(key, memories, 1.0)",
            f"{CHECKPOINT}::test_another_world_size_keeps_the_mean_of_residuals",
        ),
        (
            "a mean over ranks is a sum",
            "values[key] = _added(key, everyone, 1.0 / len(everyone))",
            "values[key] = _added(key, everyone, 1.0)",
            f"{CHECKPOINT}::test_memory_on_another_number_of_ranks",
        ),
    ),
    *planted(
        "parts_of_group",
        (
            "a group takes the part of another group",
            "return {part.rank: part for part in parts if part.leader == wanted}",
            "return {part.rank: part for part in parts}",
            f"{CHECKPOINT}::test_groups_of_ranks_have_keys_of_their_own",
        ),
    ),
    *planted(
        "needed_ranks",
        (
            "a rank takes another's part",
            "return [rank] if resizes else []",
            "return [0] if resizes else []",
            f"{CHECKPOINT}::test_the_same_ranks_get_their_own_back",
        ),
    ),
    *planted(
        "Ledger.add",
        (
            "bytes on the wire are those of payloads",
            "self.wire_bytes += row.wire_bytes",
            "self.wire_bytes += row.payload_bytes",
            f"{UNIT}/test_ledger.py::test_totals_are_sums_over_all_rows",
        ),
    ),
    *planted(
        "Fragment.apply",
        (
            "a late average drops what a rank has learned meanwhile",
            "torch.lerp(old, values, _LOCAL_WEIGHT) if late else old",
            "old",
            f"{POLICIES}::test_outer_steps",
        ),
        (
            "the outer momentum looks back, not ahead",
            "delta.add(speed, alpha=momentum)",
            "speed.add(delta, alpha=momentum)",
            f"{POLICIES}::test_outer_steps",
        ),
    ),
    *planted(
        "OneBitAdam.frozen",
        (
            "OneBitAdam takes a gradient for a momentum",
            "return self._hook.step > self._scheme.freeze_step",
            "return self._hook.step >= self._scheme.freeze_step",
            f"{POLICIES}::test_the_optimizer_is_adam_with_a_second_moment_that_stays",
        ),
    ),
    *planted(
        "_filled",
        (
            "a budget is not kept",
            "and used + new.nbytes - old.nbytes <= room:",
            "and used <= room:",
            f"{UNIT}/test_policies.py::test_a_budget_of_bits_beats_every_uniform_choice_within_it",
        ),
    ),
]

"""Bugs in the modules of frameworks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

HOSTED = "tests/hosts/test_hosted.py"
FUNCTIONS = "tests/hosts/test_functions.py"
GROUP = "tests/hosts/test_process_group.py"
GROUP_REFUSES = f"{GROUP}::test_what_a_group_cannot_do_is_refused_with_what_to_do"
LAZY = "tests/unit/test_deferred_hosts.py"
TORCHFT = "tests/hosts/test_torchft.py"
ATTACHMENT = "tests/unit/test_known_parameters.py"
CHANGED = f"{ATTACHMENT}::test_a_change_of_the_parameters_is_an_error_in_the_next_step"
FINE = f"{ATTACHMENT}::test_what_is_no_mistake_is_no_error"
QUORUM = f"{TORCHFT}::test_a_hook_follows_the_quorum[int8]"

MUTANTS: list[Mutant] = [
    *planted(
        "_needs_unscaled",
        (
            "memory is in units of what FSDP2 has divided",
            "    return hook.engine.keeps_memory\n",
            "    return False\n",
            "tests/fsdp/test_hsdp.py::test_memory_is_in_units_of_the_gradient[inside]",
        ),
    ),
    *planted(
        "CollectiveState._counted",
        (
            "others get the memory that a call still reads",
            "                record_stream(tensor)",
            "                pass",
            f"{LAZY}::test_a_caller_may_give_back_what_a_call_reads",
        ),
        (
            "a call that was waited for keeps its memory from others",
            "return result if async_op else result.new_empty(0)",
            "return result",
            f"{LAZY}::test_only_a_call_that_is_not_waited_for_keeps_its_memory_from_others",
        ),
    ),
    *planted(
        "FrameworkHook.state_dict",
        (
            "rank 0 saves its own state only",
            "return self._hook.state_dict(gather=True, dst=self._to)",
            "return self._hook.state_dict()",
            f"{HOSTED}::test_rank_0_has_the_state_of_all_and_everyone_goes_on_from_it",
        ),
    ),
    *planted(
        "FrameworkHook.attach",
        (
            "a state that came before the hook is dropped",
            "            self._hook.load_state_dict(self._pending_state)\n",
            "",
            f"{HOSTED}::test_rank_0_has_the_state_of_all_and_everyone_goes_on_from_it",
        ),
        (
            "a hook of a part of the ranks is registered",
            "if group.size() != world_size:",
            "if group.size() > world_size:",
            f"{HOSTED}::test_a_hook_that_would_not_run_or_not_be_saved_is_an_error",
        ),
        (
            "the hook of the run before stays open",
            "            self._hook.close()  # of",
            "            pass  # of",
            f"{HOSTED}::test_a_second_run_has_a_hook_of_its_own",
        ),
    ),
    *planted(
        "CommHook.__init__",
        (
            "a function as comm_hook is ignored here, too",
            'if getattr(given, "value", given) not in (None, "no"):',
            'if getattr(given, "value", None) not in (None, "no"):',
            f"{HOSTED}::test_fabric_accelerate_and_ray_are_asked_for_what_they_have",
        ),
        (
            "nodes that keep a copy keep an empty one",
            "project_configuration.save_on_each_node:\n            self._to = None",
            "project_configuration.save_on_each_node:\n            self._to = 0",
            f"{HOSTED}::test_every_rank_has_the_state_where_each_node_saves_a_copy",
        ),
    ),
    *planted(
        "CommHook.setup",
        (
            "the hook that Lightning leaves out on a CPU passes",
            'if stage == "fit" and getattr(',
            'if stage != "fit" and getattr(',
            f"{HOSTED}::test_lightning_by_what_it_has_published",
        ),
    ),
    *planted(
        "CommHook.on_train_begin",
        (
            "the checkpoint of another run is taken",
            'self._file = f"commhooks-{uuid.uuid4().hex[:8]}.pt"',
            'self._file = "commhooks-0.pt"',
            f"{HOSTED}::test_transformers_by_what_it_has_published",
        ),
        (
            "a resumed run starts its hook from zero",
            "            self.load(self._resume_from or _folder(args, state))\n",
            "",
            f"{HOSTED}::test_transformers_by_what_it_has_published",
        ),
    ),
    *planted(
        "process_group",
        (
            "ranks may differ in what they compress",
            '"least": least,',
            '"least": 0,',
            GROUP_REFUSES,
        ),
    ),
    *planted(
        "SchemeGroup.allreduce",
        (
            "a mean is summed",
            "name, op=op, async_op=True)",
            "name, async_op=True)",
            f"{GROUP}::test_all_but_large_sums_of_floats_passes_as_it_is",
        ),
    ),
    *planted(
        "_inside_of",
        (
            "a function over a group that compresses is rounded twice",
            'getattr(group, "wrapped", group)',
            "group",
            f"{GROUP}::test_what_has_a_scheme_of_its_own_runs_it_alone_over_a_group",
        ),
    ),
    *planted(
        "SchemeGroup.shutdown",
        (
            "what runs a scheme stays after its group",
            "        self.hook._close()\n",
            "",
            f"{GROUP}::test_a_group_of_some_ranks_is_made_again_and_again",
        ),
    ),
    *planted(
        "SchemeGroup.__init__",
        (
            "a group draws by a seed of its own",
            "self.hook = _UnnamedCollectives(scheme, wrapped, seed=seed)",
            "self.hook = _UnnamedCollectives(scheme, wrapped)",
            f"{GROUP}::test_two_ranks_without_a_hook_get_what_a_hook_gives",
        ),
    ),
    *planted(
        "SchemeGroup._warn",
        (
            "what a group does not compress is not told of",
            "        self._warned_calls.add(call)\n",
            "        return\n",
            f"{GROUP}::test_a_reduce_scatter_that_is_not_compressed_is_told_once",
        ),
    ),
    *planted(
        "CallMonitor._pass_begins",
        (
            "a hook that another object stands for is not watched",
            'getattr(holder, "hook_state", holder)',
            "holder",
            f"{TORCHFT}::test_a_loss_computed_beside_the_wrapper_warns_at_the_end",
        ),
    ),
    *planted(
        "CallMonitor._pass_ended",
        (
            "gradients beside torch's wrapper are silent",
            "self.calls != self._calls_at_gradient or self._awaits_last_bucket or self._is_local",
            "True",
            f"{ATTACHMENT}::test_a_loss_beside_the_wrapper_is_an_error",
        ),
        (
            "a pass whose forward half is within no_sync is a mistake",
            "or self._awaits_last_bucket or self._is_local:",
            "or self._awaits_last_bucket:",
            f"{FINE}[DistributedDataParallel-int8_0-half_inside]",
        ),
        (
            "a layer that comes twice in reentrant passes is not told of",
            "            self._pending_error = twice_error(self._names[place], place)\n",
            "",
            f"{ATTACHMENT}::test_a_layer_that_a_reentrant_checkpoint_runs_twice_is_an_error",
        ),
    ),
    *planted(
        "AttachmentGuard.pass_begins",
        (
            "an average of a wrapped model is not evaluated",
            "            if not module.training:  # an average",
            "            if False:  # an average",
            f"{ATTACHMENT}::test_a_copy_is_evaluated_and_not_trained",
        ),
    ),
    *planted(
        "Running.start",
        (
            "a hook that was registered by hand is not guarded",
            "            self._guard_model()",
            "            pass",
            f"{ATTACHMENT}::test_a_hook_that_was_registered_by_hand_is_guarded_from_its_first_call",
        ),
    ),
    *planted(
        "KnownParameters.check",
        (
            "parameters that are other objects are not noticed",
            "            self._find_others()\n        if not self._nodes:",
            "            pass\n        if not self._nodes:",
            CHANGED,
        ),
        (
            "parameters that were converted are not noticed",
            "accumulator_of(parameter) is not self._nodes[index]:",
            "False:",
            CHANGED,
        ),
        (
            "parameters that are looked at in turn are always the first",
            "self._turn = (self._turn + 1) % len(self._parameters)",
            "self._turn = 0",
            f"{ATTACHMENT}::test_a_converted_layer_whose_memory_is_the_same_by_chance_is_found",
        ),
        (
            "whoever tries again trains a model that was converted",
            "            looks = [i for i in changed",
            "            self._pointers = pointers\n            looks = [i for i in changed",
            f"{ATTACHMENT}::test_a_converted_model_is_found_behind_layers_that_are_frozen_now",
        ),
    ),
    *planted(
        "KnownParameters._refuse_gradient.refuse",
        (
            "tensors of functional_call are taken for new parameters",
            "module._parameters.get(key) is not came",
            "False",
            f"{FINE}[DistributedDataParallel-int8_1-functional]",
        ),
    ),
    *planted(
        "has_another_wrapper",
        (
            "a module that is wrapped again is refused by the first wrapper",
            "        known |= {id(other): weakref.ref(candidate) "
            "for other in candidate.module.parameters()}\n",
            "",
            f"{FINE}[DistributedDataParallel-int8_1-wrapped_again]",
        ),
    ),
    *planted(
        "LocalGradients.gradient_came",
        (
            "a gradient without a forward pass stays local, silently",
            "elif not self.is_shared(self._parameters[index].parameter):",
            "elif False:",
            f"{ATTACHMENT}::test_a_loss_beside_the_wrapper_is_an_error",
        ),
    ),
    *planted(
        "check_none_accumulated",
        (
            "a frozen layer is taken for a pass within no_sync",
            "    ddp.reducer.check_finished()  # names",
            "    pass  # names",
            f"{ATTACHMENT}::test_a_zero_optimizer_says_what_is_wrong_with_the_parameters",
        ),
    ),
    *planted(
        "register_on_composable",
        (
            "a hook is put on a list that nobody reads any more",
            "takes_hooks: Any = composable_ddp(state) if state.has_initialized else model",
            "takes_hooks: Any = model",
            f"{GROUP}::test_a_module_of_replicate_is_registered_before_and_after_its_first_forward",
        ),
        (
            "a module of replicate() gets a second hook",
            "    if present:\n",
            "    if False:\n",
            f"{GROUP}::test_a_module_of_replicate_is_registered_before_and_after_its_first_forward",
        ),
    ),
    *planted(
        "_group",
        (
            "replicas of a mesh are averaged with everyone",
            "group: dist.ProcessGroup | None = given if mesh is None else mesh.get_group()",
            "group: dist.ProcessGroup | None = given",
            f"{GROUP}::test_a_module_of_replicate_averages_over_its_mesh_or_group",
        ),
    ),
    *planted(
        "collectives_of",
        (
            "options of an earlier call are taken",
            "repr(sorted(options.items())))",
            "repr(sorted(options)))",
            f"{FUNCTIONS}::test_functions_use_what_they_made_until_its_group_is_destroyed",
        ),
        (
            "a function runs a scheme that keeps memory",
            "        if slots_of(collectives.scheme):\n",
            "        if collectives.calls:\n",
            f"{FUNCTIONS}::test_what_cannot_be_done_is_refused_with_what_to_do",
        ),
    ),
    *planted(
        "CollectiveCall.is_plain",
        (
            "whole numbers are rounded by a scheme",
            "return not is_compressible(self.input) or type(scheme) is Dense",
            "return type(scheme) is Dense",
            f"{FUNCTIONS}::test_tensors_of_any_kind_are_reduced_in_place[2]",
        ),
    ),
    *planted(
        "CollectiveCall.exchange",
        (
            "a reduce-scatter overwrites its input",
            "raw = raw if exact else raw.clone()",
            "raw = raw",
            f"{FUNCTIONS}::test_a_switch_sends_what_was_held_of_parts_and_leaves_the_input_alone",
        ),
    ),
    *planted(
        "_unrounded.run",
        (
            "a mean without a scheme is a sum",
            'op: Literal["sum", "mean"] = "sum" if total else "mean"',
            'op: Literal["sum", "mean"] = "sum"',
            f"{FUNCTIONS}::test_tensors_of_any_kind_are_reduced_in_place[2]",
        ),
    ),
    *planted(
        "CollectiveState.run",
        (
            "the compiler looks into calls",
            "    @dynamo_disable\n    def run(",
            "    def run(",
            f"{FUNCTIONS}::test_graphs_of_compiled_functions_break_at_calls",
        ),
    ),
    *planted(
        "CollectiveState.on_group_changed",
        (
            "calls of other ranks that failed are raised where the ranks have changed",
            "self._pending.clear()",
            "pass",
            "tests/checkpoint/test_other_ranks.py"
            "::test_calls_that_failed_are_forgotten_where_the_ranks_change",
        ),
    ),
    *planted(
        "CollectiveState._start",
        (
            "a call does not wait for the one before of its name",
            "            self._wait_for(name)\n            self.drivers.join()\n",
            "            pass\n",
            f"{FUNCTIONS}::test_calls_that_overlap_give_what_they_give_one_after_the_other",
        ),
    ),
    *planted(
        "CollectiveState._counted",
        (
            "calls that were not finite are not counted",
            "self.engine.skipped += engine.skipped",
            "self.engine.skipped = engine.skipped",
            f"{FUNCTIONS}::test_a_call_that_is_not_finite_on_one_rank_changes_no_memory_on_any",
        ),
    ),
    *planted(
        "CollectiveState.switch",
        (
            "a switch waits for no call",
            "        self.wait()\n        super().switch(scheme, **options)",
            "        super().switch(scheme, **options)",
            f"{FUNCTIONS}::test_a_switch_waits_for_calls_that_are_under_way",
        ),
    ),
    *planted(
        "_QuorumHook.start",
        (
            "a replica that recovers sends its gradients",
            "                    buffer.zero_()\n",
            "                    pass\n",
            QUORUM,
        ),
    ),
    *planted(
        "_QuorumHook._sync_group",
        (
            "a hook follows the first quorum only",
            "if group is not self._group:",
            "if self._group is None:",
            QUORUM,
        ),
    ),
    *planted(
        "_QuorumHook._outcome",
        (
            "the manager does not hear of a collective that failed",
            "            self._manager.report_error(error)\n            return buffer",
            "            return buffer",
            QUORUM,
        ),
    ),
    *planted(
        "DiLoCo.change_group",
        (
            "what was sent to the ranks before is applied on some of those now",
            "self._pending, change = [], change_hook_group(self.hook, group)",
            "change = change_hook_group(self.hook, group)",
            "tests/checkpoint/test_other_ranks.py::test_diloco_takes_a_rank_in",
        ),
    ),
    *planted(
        "broadcast_outer",
        (
            "a rank that joins trains from its own parameters",
            "            fragment.restore()\n",
            "            pass\n",
            "tests/checkpoint/test_other_ranks.py::test_diloco_takes_a_rank_in",
        ),
    ),
    *planted(
        "Ledger.add",
        (
            "a total of dense bytes counts those that were sent",
            "self.dense_wire_bytes += row.dense_wire_bytes",
            "self.dense_wire_bytes += row.wire_bytes",
            "tests/unit/test_ledger.py::test_totals_are_sums_over_all_rows",
        ),
    ),
    *planted(
        "HookState.residual",
        (
            "a residual that was asked for changes with later steps",
            "self.parameters.in_parameter_order(name, value).clone()",
            "self.parameters.in_parameter_order(name, value)",
            "tests/unit/test_attachment.py::test_a_residual_that_was_asked_for_stays_what_it_is",
        ),
    ),
]

"""Bugs in hosts that shard gradients over ranks, and in what all of them share."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

FSDP2 = "tests/fsdp/test_fsdp2.py"
FSDP1 = "tests/fsdp/test_fsdp1.py"
BESIDE = f"{FSDP1}::test_a_loss_beside_a_whole_unit_is_an_error"
HALVES = "tests/unit/test_shard_collectives.py"
ADD_UP = f"{FSDP2}::test_what_is_sent_and_what_is_kept_are_the_gradients"
LOADS = f"{FSDP2}::test_what_one_host_saves_another_loads"
FACTOR = f"{FSDP2}::test_the_divide_factor_of_fsdp2_holds"
REFUSED = f"{FSDP2}::test_what_cannot_run_is_refused_with_what_to_do"
BETWEEN = f"{FSDP2}::test_between_nodes_what_was_not_sent_is_kept_and_saved"
OWN_MEMORY = "test_a_mean_that_a_scheme_returns_in_memory_of_its_own_arrives"

STEPS = "tests/fsdp/test_sharded_steps.py"
GATHERED = "tests/fsdp/test_gathered_parameters.py"
PLACEMENT = "tests/checkpoint/test_placement.py"
COLUMNS = (
    f"{PLACEMENT}::test_residuals_of_another_column_are_refused_and_those_of_the_own_are_found"
)
FSDP2_REFUSED = "tests/fsdp/test_fsdp2_refused.py"
TOGETHER = "tests/fsdp/test_hsdp.py::test_the_states_of_all_ranks_are_put_together"

MUTANTS: list[Mutant] = [
    *planted(
        "SchemeReduceScatter.__call__",
        (
            "FSDP2 gets a mean for a sum",
            "output_tensor.mul_(ranks / factor)",
            "output_tensor.mul_(1.0 / factor)",
            FACTOR,
        ),
        (
            "FSDP2's divide factor divides twice",
            "factor = before if op == dist.ReduceOp.SUM else",
            "factor =",
            FACTOR,
        ),
        (
            "FSDP2's divide factor is ignored",
            "else self._module.group.gradient_divide_factor",
            "else float(ranks)",
            FACTOR,
        ),
    ),
    *planted(
        "FSDP2Module.layout",
        (
            "a missing gradient is not noticed",
            "if total != numel:",
            "if total < numel:",
            f"{FSDP2}::test_parameters_without_a_gradient_are_named",
        ),
        (
            "frozen parameters are expected in the bucket",
            "for parameter in self.group.fsdp_params\n"
            "            if parameter.sharded_param.requires_grad\n        ]",
            "for parameter in self.group.fsdp_params]",
            f"{FSDP2}::test_frozen_parameters_are_left_out_of_buckets_and_states",
        ),
    ),
    *planted(
        "GatheredParameters.switch",
        (
            "parameters are gathered by any scheme",
            "super().switch(_deterministic(make(scheme, **options) if options else scheme))",
            "super().switch(scheme, **options)",
            f"{GATHERED}::test_schemes_that_are_refused_and_gathers_that_fail",
        ),
    ),
    *planted(
        "_FEWEST_BITS",
        (
            "parameters are gathered as signs",
            "_FEWEST_BITS = 4",
            "_FEWEST_BITS = 1",
            f"{GATHERED}::test_schemes_that_are_refused_and_gathers_that_fail",
        ),
    ),
    *planted(
        "_deterministic",
        (
            "what is inside a cast is not looked at",
            "inside = list(walk(built))",
            "inside = [built]",
            f"{GATHERED}::test_schemes_that_are_refused_and_gathers_that_fail",
        ),
    ),
    *planted(
        "join_parts",
        (
            "one finite part stands for all",
            "if len(flags) == len(parts) else None",
            "if flags else None",
            f"{HALVES}::test_what_is_not_finite_beside_others_changes_no_memory",
        ),
    ),
    *planted(
        "_origin",
        (
            "a pickle that was asked for its rank is of this rank",
            " or (origin is not None and not hook.agreed)",
            "",
            f"{PLACEMENT}::test_a_pickle_of_another_column_is_refused",
        ),
    ),
    *planted(
        "Packing.of",
        (
            "parameters that are not cut share blocks with pieces",
            "(n, cut == every)",
            "(n, True)",
            f"{GATHERED}::test_beside_tensor_parallelism",
        ),
    ),
    *planted(
        "GatherPacked.is_plain",
        (
            "a tensor of the user's own form is taken apart",
            "return unknown or super().is_plain(scheme)",
            "return super().is_plain(scheme)",
            f"{GATHERED}::test_what_has_no_known_parts_travels_as_it_is",
        ),
    ),
    *planted(
        "_guard.has_hook",
        (
            "another reduction of FSDP2 is not noticed",
            "return kind.hook_of(group) is hook",
            "return getattr(group, kind.place) is not None",
            f"{FSDP2_REFUSED}::test_a_replaced_reduction_is_refused_and_noticed",
        ),
    ),
    *planted(
        "register_on_fsdp2",
        (
            "between nodes the ranks of a node are averaged",
            "else replica_ranks(fsdp2_model, replicate_group)",
            "else fsdp2_model.ranks",
            f"{FSDP2}::test_between_nodes_any_scheme_averages",
        ),
    ),
    *planted(
        "_averages_itself",
        (
            "replicas that FSDP2 averages over are averaged over again",
            "return any(isinstance(module.group.mesh_info, DDPMeshInfo)"
            " for module in fsdp2_model.modules)",
            "return not fsdp2_model.modules",
            REFUSED,
        ),
    ),
    *planted(
        "_sharded",
        (
            "every parameter counts as cut along its rows",
            "dtype, parameter.fsdp_placement.dim, trained",
            "dtype, 0, trained",
            f"{FSDP2}::test_parameters_may_be_cut_along_their_columns",
        ),
    ),
    *planted(
        "FSDP2Model.of",
        (
            "all FSDP2 modules have one number",
            "FSDP2Module(number, group, names)",
            "FSDP2Module(0, group, names)",
            f"{FSDP2}::test_none_has_the_bits_of_fsdp2_itself[plain]",
        ),
    ),
    *planted(
        "register_on_fsdp2",
        (
            "between nodes all ranks have the pieces of the first",
            "shards.size(), shards.rank())",
            "shards.size(), 0)",
            BETWEEN,
        ),
    ),
    *planted(
        "ShardedParameters.layout_of",
        (
            "pieces lie parameter after parameter",
            "for rank in self._ranks() for name in names",
            "for name in names for rank in self._ranks()",
            ADD_UP,
        ),
    ),
    *planted(
        "ShardedParameters.to_checkpoint_layout",
        (
            "padding is saved as a part of the parameter",
            "saved[name] = whole.narrow(dim, 0, length).contiguous()",
            "saved[name] = whole.contiguous()",
            LOADS,
        ),
        (
            "what was not sent of padding is lost",
            "if whole.shape[dim] > length:",
            "if whole.shape[dim] < length:",
            f"{FSDP2}::test_a_resumed_run_continues_bit_for_bit",
        ),
    ),
    *planted(
        "ShardedParameters.to_bucket_layout",
        (
            "padding of another number of ranks is taken",
            "if rest is None or list(rest.shape) != shape:",
            "if rest is None:",
            "tests/unit/test_sharded_parameters.py"
            "::test_padding_stays_with_as_many_ranks_and_is_left_out_on_others",
        ),
        (
            "a loaded piece is the next rank's",
            "kept[self._name(name, rank)] = pieces[rank].contiguous()",
            "kept[self._name(name, rank)] = pieces[rank - 1].contiguous()",
            f"{LOADS}[2-2-ddp-fsdp2]",
        ),
    ),
    *planted(
        "ShardedParameters._piece",
        (
            "pieces are rounded down",
            "-(-shape[parameter.dim] // self._world_size)",
            "shape[parameter.dim] // self._world_size",
            ADD_UP,
        ),
    ),
    *planted(
        "ExchangeLauncher.agree",
        (
            "ranks do not agree on whether their shards were finite",
            "        if self._engine.needs_agreement:\n",
            "        if False:\n",
            f"{FSDP2}::test_a_step_that_overflows_on_one_rank_changes_no_residual_on_any",
        ),
    ),
    *planted(
        "_agree_on_finite",
        (
            "a rank commits by the verdict on its own shard",
            "step.finite, step.sharded = [worst[0] == 0], False",
            "step.finite, step.sharded = [good], False",
            f"{FSDP2}::test_a_step_that_overflows_on_one_rank_changes_no_residual_on_any",
        ),
    ),
    *planted(
        "PackedCodec.reduce_scatter",
        (
            "every rank decodes its shard as the first one",
            "unpack(received, shards, bucket.rank, inside.output,",
            "unpack(received, shards, 0, inside.output,",
            f"{HALVES}::test_each_rank_gets_its_part_of_the_mean_with_one_rounding",
        ),
        (
            "the mean of a shard that is reduced alone is of one rank less",
            "inside.output, random, 1.0 / bucket.world_size)",
            "inside.output, random, 1.0 / (bucket.world_size - 1))",
            f"{HALVES}::test_each_rank_gets_its_part_of_the_mean_with_one_rounding",
        ),
    ),
    *planted(
        "SchemeAllGather.__call__",
        (
            "the owner of a shard computes with its exact parameters",
            "return self._collectives.run(call, None, async_op)",
            "kept = input_tensor.clone()\n"
            "        self._collectives.run(call, None, False)\n"
            "        output_tensor.view(group.size(), -1)[group.rank()] = kept.view(-1)",
            f"{FSDP2}::test_gathered_parameters_are_rounded_alike_on_all_ranks",
        ),
    ),
    *planted(
        "_deterministic",
        (
            "gathered parameters are rounded at random",
            "random = any(getattr(part, name, False)",
            "random = all(getattr(part, name, False)",
            f"{FSDP2}::test_gathered_parameters_are_rounded_alike_on_all_ranks",
        ),
    ),
    *planted(
        "GatheredParameters.__init__",
        (
            "parameters are gathered over all ranks",
            "super().__init__(scheme, ranks, seed",
            "super().__init__(scheme, None, seed",
            f"{FSDP2}::test_parameters_are_gathered_among_the_ranks_that_have_their_shards",
        ),
    ),
    *planted(
        "replicate",
        (
            "modules are exchanged with the rest of the model",
            "for module in [*modules, model]:",
            "for module in [model]:",
            "tests/hosts/test_process_group.py::test_replicas_on_fsdp2_average_by_a_scheme",
        ),
    ),
    *planted(
        "_names",
        (
            "parameters of all units have the same names",
            'plain_name(f"{_prefix(name)}{local}")',
            "plain_name(local)",
            f"{FSDP1}::test_what_one_host_saves_another_loads",
        ),
    ),
    *planted(
        "register_on_fsdp1",
        (
            "all units have one number",
            "(hook, number, layout, parameters, monitor)",
            "(hook, 0, layout, parameters, monitor)",
            f"{FSDP1}::test_the_mean_arrives[FULL_SHARD]",
        ),
        (
            "a loss beside a unit that is whole stays local, silently",
            "_WholeUnitMonitor(unit, parameters) if _is_whole(unit) else None",
            "None",
            BESIDE,
        ),
        (
            "whole gradients are padded as if they were cut",
            "1 if _is_whole(unit) else group.size()",
            "group.size()",
            f"{FSDP1}::test_whole_gradients_have_no_padding",
        ),
    ),
    *planted(
        "reduce_unit",
        (
            "a penalty on the parameters of a whole unit is refused",
            "        monitor.hook_ran_in = backward_number()\n",
            "        pass\n",
            BESIDE,
        ),
    ),
    *planted(
        "register_on_fsdp1.has_hook",
        (
            "another hook of a unit is not noticed",
            "return present is reduce_unit and state[0] is hook",
            "return present is not None",
            f"{FSDP1}::test_what_cannot_run_is_refused",
        ),
    ),
    *planted(
        "_group",
        (
            "hybrid sharding is registered, whose hook never runs",
            'if "HYBRID" in unit.sharding_strategy.name:',
            'if unit.sharding_strategy.name == "HYBRID":',
            f"{FSDP1}::test_what_cannot_run_is_refused",
        ),
    ),
    *planted(
        "register",
        (
            "a search is registered on a host that chooses its buckets",
            'scheme="auto" if scheme == "auto" and "auto" not in takes else None,',
            "scheme=None,",
            f"{FSDP1}::test_what_cannot_run_is_refused",
        ),
    ),
    *planted(
        "check_returns_shards",
        (
            "hosts that need shards take schemes of whole buckets",
            "    if not scheme.traits.shards:\n",
            "    if not scheme.traits:\n",
            "tests/hosts/test_every_host.py::test_a_host_runs_what_the_page_says[FSDP2]",
        ),
    ),
    *planted(
        "HookBucket.with_epilogue",
        (
            "FSDP2's output is not written where a scheme has memory of its own",
            "            mean = into.copy_(mean)\n",
            "            pass\n",
            f"{FSDP2}::{OWN_MEMORY}",
        ),
        (
            "between nodes the mean stays in memory of the scheme's own",
            "    if mean.data_ptr() != into.data_ptr():",
            "    if bucket.shards is not None and mean.data_ptr() != into.data_ptr():",
            f"{FSDP2}::{OWN_MEMORY}",
        ),
        (
            "a unit's shard is not written where a scheme has memory of its own",
            "    if mean.data_ptr() != into.data_ptr():",
            "    if bucket.shards is None and mean.data_ptr() != into.data_ptr():",
            f"{FSDP1}::test_the_mean_arrives_from_memory_of_a_schemes_own",
        ),
    ),
    *planted(
        "FlatParameters.to_bucket_layout",
        (
            "a unit's padding of another number of ranks is taken",
            "if saved is None or saved.shape != piece.shape:",
            "if saved is None:",
            "tests/unit/test_sharded_parameters.py"
            "::test_padding_of_a_unit_stays_with_as_many_ranks_only",
        ),
    ),
    *planted(
        "Runner._open_for",
        (
            "a bucket after the end of backward begins another step",
            "        if bucket.key not in step.buckets:\n",
            "        if False:\n",
            f"{STEPS}::test_nothing_is_lost_or_sent_twice[_two_roots-3]",
        ),
        (
            "a module that is reduced twice adds its residual twice",
            "        self.gradients_written()\n        return None\n",
            "        return step\n",
            f"{STEPS}::test_nothing_is_lost_or_sent_twice[_zeros_at_first-6]",
        ),
    ),
    *planted(
        "HostGuard.pass_begins",
        (
            "modules that are sharded later are not missed",
            "{**units, **self._present(module)}",
            "units",
            f"{STEPS}::test_modules_that_are_sharded_after_register_are_missed",
        ),
        (
            "a sharded model that was converted meets torch's own error",
            "        self._parameters.check()\n",
            "",
            f"{FSDP1}::test_parameters_of_another_dtype_are_an_error_before_the_forward_pass",
        ),
    ),
    *planted(
        "ReplicaAllReduce.__call__",
        (
            "the divide factor does not count replicas",
            "            units *= self.hook.world_size\n",
            "            pass\n",
            f"{STEPS}::test_the_divide_factor_stands_for_all_ranks_also_between_nodes",
        ),
    ),
    *planted(
        "groups_of",
        (
            "modules that were sharded together are reduced as two",
            "if groups and groups[0] not in by_module.values():",
            "if groups:",
            f"{STEPS}::test_nothing_is_lost_or_sent_twice[_together-3]",
        ),
    ),
    *planted(
        "Handle",
        (
            "FSDP2 does not wait for handles",
            "class Handle(dist.Work):",
            "class Handle:",
            f"{STEPS}::test_parameters_that_are_gathered_ahead_are_waited_for",
        ),
    ),
    *planted(
        "with_local_shards",
        (
            "bytes of another column's pieces are taken",
            "find(parameter_name(name)) for name in names",
            "find(name) for name in names",
            COLUMNS,
        ),
        (
            "residuals of another column are taken",
            'if pieces.get(name, "") != here.get(name, "")]',
            "if False]",
            COLUMNS,
        ),
    ),
    *planted(
        "_part",
        (
            "states of whole parameters are taken for pieces",
            'if "placement" in part or state["version"] > 2:',
            'if "placement" in part:',
            "tests/unit/test_checkpoint.py"
            "::test_parts_of_other_pieces_of_the_model_are_left_out_or_refused",
        ),
    ),
    *planted(
        "_in_order",
        (
            "a turned mesh has other pieces",
            "sorted(pieces, key=dimension)",
            "pieces",
            f"{PLACEMENT}::test_pieces_are_told_alike_on_turned_meshes",
        ),
        (
            "cuts of one dimension may be in any order",
            "sorted(pieces, key=dimension)",
            "sorted(pieces)",
            f"{PLACEMENT}::test_pieces_are_told_alike_on_turned_meshes",
        ),
    ),
    *planted(
        "_cut",
        (
            "rows that are apart are told as rows that are not",
            ' + (f" in steps of {stride}" if stride > 1 else "")',
            "",
            f"{PLACEMENT}::test_pieces_are_told_alike_on_turned_meshes",
        ),
    ),
    *planted(
        "_rounds_alone",
        (
            "what is rounded inside feedback and another wrapper counts as exact",
            "for inside in walk(scheme):\n        traits",
            "for inside in (scheme,):\n        traits",
            "tests/unit/test_exactly.py"
            "::test_what_is_rounded_inside_any_wrapper_leaves_out_what_is_not_cut",
        ),
        (
            "a guard decides for parameters that are not cut",
            " or isinstance(inside, Guard)",
            "",
            "tests/unit/test_exactly.py"
            "::test_what_is_rounded_inside_any_wrapper_leaves_out_what_is_not_cut",
        ),
    ),
    *planted(
        "ExactParameters.exchange",
        (
            "what was kept of parameters that travel exactly is lost",
            "dense = with_flush(Dense())",
            "dense = Dense()",
            f"{HALVES}::test_what_was_kept_of_parameters_that_travel_exactly_is_sent_once",
        ),
        (
            "uncut parameters travel with the others",
            "        exact, others = self._split(bucket.layout)\n",
            "        exact, others = [], list(range(len(bucket.layout)))\n",
            "tests/unit/test_shard_collectives.py::test_some_parameters_are_averaged_exactly_beside_others",
        ),
    ),
    *planted(
        "replicated_parameters",
        (
            "one dimension of tensor parallelism that cuts is enough",
            "ShardSpec()).shard_groups != every",
            "ShardSpec()).shard_groups == frozenset()",
            "tests/unit/test_exactly.py"
            "::test_a_parameter_is_shared_along_each_dimension_that_does_not_cut_it",
        ),
    ),
    *planted(
        "_origin",
        (
            "a pickle of another column is taken",
            "            if piece_there != piece:",
            "            if False:",
            f"{PLACEMENT}::test_a_pickle_of_another_column_is_refused",
        ),
    ),
    *planted(
        "_sharded",
        (
            "FSDP2 does not say which pieces it has",
            "cut = shard_spec_of(dtensor_spec_before(parameter))",
            'piece = ""',
            COLUMNS,
        ),
    ),
    *planted(
        "FSDP2Model.of",
        (
            "modules that are sharded over other ranks are taken",
            "if any(fsdp2_ranks(group) is not ranks for group in groups):",
            "if ranks is None:",
            f"{FSDP2_REFUSED}::test_modules_that_are_sharded_over_different_ranks_are_refused",
        ),
    ),
    *planted(
        "groups_of",
        (
            "parameters on a second mesh are not looked at",
            "if len(groups) > 1:",
            "if len(groups) > 2:",
            f"{FSDP2_REFUSED}::test_a_module_on_several_meshes_is_refused",
        ),
    ),
    *planted(
        "check_free",
        (
            "a reduction of the user's own is replaced",
            "type(present) is not DefaultReduceScatter:",
            "type(present) is type(None):",
            f"{FSDP2_REFUSED}::test_memory_of_the_process_group_is_refused",
        ),
    ),
    *planted(
        "needs_reshard",
        (
            "pieces from between nodes are those of a hook within them",
            "if hook.target.shards is None:",
            "if hook.target.group() is None:",
            f"{TOGETHER}[fsdp2-2]",
        ),
    ),
    *planted(
        "cuts_in",
        (
            "FSDP1 does not say which pieces it has",
            "shard_spec_of(spec)\n        for parameter_name, spec in named_specs\n"
            '        if hasattr(spec, "placements")\n    }',
            "shard_spec_of(spec) for parameter_name, spec in named_specs if False}",
            COLUMNS,
        ),
    ),
    *planted(
        "localize",
        (
            "local shards forget whose they are",
            "setattr(local, _SPEC, dtensor_spec_of(parameter))",
            "setattr(local, _SPEC, None)",
            COLUMNS,
        ),
    ),
]

"""Bugs in optimizers that are sharded over ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

TEST = "tests/hosts/test_zero_optimizer.py"
STEPS = "tests/hosts/test_zero_steps.py"
BITS = f"{TEST}::test_two_ranks_have_the_bits_of_plain_training"
PAIRS = f"{TEST}::test_pairs_of_features_have_the_bits_of_plain_training"
OVERFLOW = f"{STEPS}::test_a_step_that_overflows_on_one_rank_changes_nothing_on_any"
LOST = f"{TEST}::test_what_ranks_have_and_what_the_owner_keeps_are_the_exact_parameters"

MUTANTS: list[Mutant] = [
    *planted(
        "_codec_of_differences",
        (
            "variances that grow are taken",
            "codec.error.variance > 1",
            "codec.error.variance > 1000",
            f"{STEPS}::test_what_cannot_be_combined_is_refused",
        ),
    ),
    *planted(
        "BucketShard.__init__",
        (
            "a piece begins at the shard's begin within the bucket, not within the parameter",
            "entries = slice(start - offset, stop - offset)",
            "entries = slice(start - begin, stop - begin)",
            BITS,
        ),
    ),
    *planted(
        "BucketShard.add_mean",
        (
            "a second gradient replaces the first",
            "piece.value.grad += part",
            "piece.value.grad = part",
            f"{PAIRS}[two passes]",
        ),
    ),
    *planted(
        "BucketShard.adopt_written",
        (
            "loaded parameters go back to the owner's values",
            "torch.where(held == self._left, self.exact, held)",
            "self.exact",
            f"{STEPS}::test_parameters_that_are_loaded_or_clipped_in_data_hold",
        ),
    ),
    *planted(
        "BucketShard._take_back",
        (
            "moments are not taken back",
            "if state:  # an empty one",
            "if not state:  # an empty one",
            OVERFLOW,
        ),
        (
            "exact values are not taken back",
            "piece.value.copy_(before)",
            "before.copy_(piece.value)",
            OVERFLOW,
        ),
    ),
    *planted(
        "Gather.exchange",
        (
            "differences are given back before a GPU has packed them",
            "        bucket = engine.bucket(message, shard.layout, output=whole)\n"
            "        return (yield from scheme.all_gather(bucket, shard.spans)).mean",
            "        bucket = engine.bucket(message, shard.layout, output=whole)\n"
            "        mean = lambda value: (yield from scheme.all_gather(value, shard.spans)).mean\n"
            "        return mean(bucket)",
            "tests/unit/test_deferred_hosts.py::test_a_bucket_is_stepped_while_another_is_packed",
        ),
    ),
    *planted(
        "Gather.exchange",
        (
            "the owner adds its exact values, not what it sent",
            "        return (yield from scheme.all_gather(bucket, shard.spans)).mean\n",
            "        mean = (yield from scheme.all_gather(bucket, shard.spans)).mean\n"
            "        mean[slice(*shard.spans[engine.rank])] = own\n        return mean\n",
            f"{TEST}::test_all_ranks_have_equal_parameters_after_every_step",
        ),
    ),
    *planted(
        "Gather.apply",
        (
            "parameters whose gradient was dropped take what was gathered",
            " if parameter not in shard.dropped]",
            "]",
            f"{STEPS}::test_gradients_that_the_model_drops_are_dropped",
        ),
    ),
    *planted(
        "Shards.clip",
        (
            "the norm is this rank's",
            "dist.all_reduce(total, op, group=self._model.process_group)",
            "dist.all_reduce(total.clone(), op, group=self._model.process_group)",
            f"{TEST}::test_clipping_by_the_norm_over_all_shards",
        ),
    ),
    *planted(
        "Shards.step",
        (
            "all gradients are seen by the step of each bucket",
            "_set_gradients(dict.fromkeys(gradients))\n        under_way",
            "under_way",
            BITS,
        ),
    ),
    *planted(
        "Shards._step",
        (
            "a step in backward keeps no copy",
            "shard.back_up(self.optimizer.state)",
            "pass",
            OVERFLOW,
        ),
    ),
    *planted(
        "load_piece",
        (
            "a piece takes the first entries of its parameter",
            'span = slice(begin - saved_piece["begin"], end - saved_piece["begin"])',
            "span = slice(0, end - begin)",
            f"{STEPS}::test_a_gathered_state_loads_on_another_number_of_ranks",
        ),
    ),
    *planted(
        "Reducer.keep_registered_buckets",
        (
            "buckets that should stay follow arrival",
            "self.plan.follows_arrival, self.plan.splits.ignored = False, True",
            "self.plan.splits.ignored = True",
            BITS,
        ),
    ),
    *planted(
        "BucketShard._take_back",
        (
            "state that began in a step that overflowed stays",
            "                states.pop(piece.value, None)\n",
            "                pass\n",
            OVERFLOW,
        ),
    ),
    *planted(
        "Shards.clip",
        (
            "gradients are clipped by the norm of one shard",
            "clip_grads_with_norm_(values, max_norm, total)",
            "clip_grads_with_norm_(values, max_norm, norm)",
            f"{TEST}::test_clipping_by_the_norm_over_all_shards",
        ),
        (
            "norms of shards are added, not their squares",
            "norm.float().pow(norm_type)",
            "norm.float()",
            f"{TEST}::test_clipping_by_the_norm_over_all_shards",
        ),
    ),
    *planted(
        "Shards.zero_grad",
        (
            "a step keeps the gradients that no_sync has accumulated",
            "                piece.value.grad = None\n        self._placeholders.forget()",
            "                pass\n        self._placeholders.forget()",
            BITS,
        ),
    ),
    *planted(
        "Gather.apply",
        (
            "differences replace parameters",
            "foreach_add if packed else foreach_copy",
            "foreach_copy",
            LOST,
        ),
    ),
    *planted(
        "gathered",
        (
            "parts of a parameter are put together in another order",
            'torch.cat([part["memory"][key][name] for part in parts])',
            'torch.cat([part["memory"][key][name] for part in reversed(parts)])',
            f"{STEPS}::test_a_resumed_run_continues_bit_for_bit",
        ),
    ),
    *planted(
        "load_piece",
        (
            "states are taken by position",
            "    saved_piece = saved.get(piece.name)\n",
            "    saved_piece = dict(zip(sorted(saved), saved.values())).get(piece.name)\n",
            f"{STEPS}::test_a_resumed_run_continues_bit_for_bit",
        ),
        (
            "exact values are not loaded",
            '    piece.value.detach().copy_(entries.pop("exact"))\n',
            '    entries.pop("exact")\n',
            f"{STEPS}::test_a_resumed_run_continues_bit_for_bit",
        ),
    ),
    *planted(
        "ZeroOptimizer.load_state_dict",
        (
            "the state before a loaded one stays",
            "        self.state.clear()\n",
            "",
            f"{STEPS}::test_a_resumed_run_continues_bit_for_bit",
        ),
        (
            "groups go on with the shards from before loading",
            '            group["params"] = self._shards.values(parameters)\n',
            "",
            f"{STEPS}::test_a_resumed_run_continues_bit_for_bit",
        ),
    ),
    *planted(
        "ZeroOptimizer",
        (
            "what no_sync has accumulated counts in the next step, too",
            "            parameter.grad = None\n\n    @torch.no_grad()\n    def clip",
            "            pass\n\n    @torch.no_grad()\n    def clip",
            f"{STEPS}::test_zero_grad_drops_what_was_accumulated",
        ),
    ),
    *planted(
        "ZeroOptimizer.__init__",
        (
            "a scheme that averages whole buckets is taken",
            '        check_returns_shards(self.hook.scheme, "ZeroOptimizer", '
            '"ZeroOptimizer(scheme=...)")\n',
            "",
            "tests/hosts/test_every_host.py::test_a_host_runs_what_the_page_says[`ZeroOptimizer`]",
        ),
    ),
    *planted(
        "_on_all_ranks",
        (
            "each rank has a verdict of its own",
            "dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)",
            "dist.all_reduce(wrong.clone(), dist.ReduceOp.MAX, group=group)",
            OVERFLOW,
        ),
    ),
    *planted(
        "Gather.exchange",
        (
            "differences do not have what was not sent before",
            "shard.exact - shard.shared_values()",
            "shard.exact - shard.exact",
            LOST,
        ),
    ),
    *planted(
        "Gather.apply",
        (
            "parameters of 16 bits round the owner's exact values",
            "shard.settle(rounded=packed or shard.dtype != shard.exact.dtype)",
            "shard.settle(rounded=packed)",
            f"{TEST}::test_another_memory_format_and_16_bits_are_stepped_in_order_and_in_float32",
        ),
    ),
    *planted(
        "PackedCodec.all_gather",
        (
            "shards are packed with the bits of the first phase",
            "self.pack_shard(Piece.of(inside), shards, bucket.rank, random)",
            "self.pack_shard(Piece.of(inside), shards, bucket.rank, random.first)",
            f"{LOST}[some]",
        ),
    ),
    *planted(
        "Shards.drop_with_placeholders",
        (
            "means stay where the model has dropped its gradients",
            "            self.zero_grad()\n            return\n",
            "            return\n",
            f"{STEPS}::test_gradients_that_the_model_drops_are_dropped",
        ),
    ),
    *planted(
        "BucketShard.drop",
        (
            "a parameter without a gradient is stepped",
            "                piece.value.grad = None\n        self._take_back",
            "                pass\n        self._take_back",
            f"{STEPS}::test_gradients_that_the_model_drops_are_dropped",
        ),
    ),
    *planted(
        "check_elementwise",
        (
            "optimizers that count their calls are taken",
            "[gradient if other is part else None for other in parts]",
            "[*gradients.split(40)]",
            f"{STEPS}::test_gradients_of_one_rank_are_no_step",
        ),
    ),
    *planted(
        "check_none_accumulated",
        (
            "gradients of this rank alone are no error",
            "type(parameter.parameter.grad) is not ShardedGrad",
            "type(parameter.parameter.grad) is None",
            f"{STEPS}::test_gradients_of_one_rank_are_no_step",
        ),
    ),
    *planted(
        "ShardedGradPlaceholders.install",
        (
            "a rank's own gradients stay where the mean is expected",
            "parameter.grad = ShardedGrad(parameter)",
            "pass",
            f"{STEPS}::test_misuse_is_an_error",
        ),
    ),
    *planted(
        "ShardedGradPlaceholders.remove",
        (
            "another backward pass drops the mean of the one before",
            "self._away.add(parameter)",
            "pass",
            f"{PAIRS}[two passes]",
        ),
    ),
]

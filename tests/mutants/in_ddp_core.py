"""Bugs in ``ddp_core``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

UNIT, DISTRIBUTED = "tests/unit", "tests/distributed"
COLLECTIVES = f"{UNIT}/test_collectives.py"
LAYOUT = f"{UNIT}/test_layout.py"
CORE = f"{DISTRIBUTED}/test_ddp_core.py"

MUTANTS: list[Mutant] = [
    *planted(
        "ddp_core/_collectives.py",
        (
            "the mean sums before it divides",
            "tensors = [tensor * (1.0 / len(tensors)) for tensor in tensors]",
            "tensors = [torch.stack(list(tensors)).sum(0) / len(tensors)]",
            f"{COLLECTIVES}::test_the_mean_scales_before_it_sums",
        ),
        (
            "gathered rows are in another order",
            "for rank in request.ranks or everyone])",
            "for rank in reversed(request.ranks or everyone)])",
            f"{COLLECTIVES}::test_all_gather_stacks_in_rank_order",
        ),
        (
            "an all-to-all gives every rank its own row",
            "results.append(torch.stack([requests[source].tensor[place] for source in ranks]))",
            "results.append(requests[rank].tensor.clone())",
            f"{COLLECTIVES}::test_all_to_all_transposes_ranks_and_rows",
        ),
        (
            "an all-reduce is counted once",
            "return self.payload_nbytes * 2 * (world_size - 1) / world_size",
            "return self.payload_nbytes * (world_size - 1) / world_size",
            f"{COLLECTIVES}::test_bytes_follow_the_bandwidth_optimal_algorithm",
        ),
        (
            "what is reduced how is not compared",
            "return (*super().signature(), self.op)",
            "return super().signature()",
            f"{COLLECTIVES}::test_ranks_that_ask_for_different_things_are_told",
        ),
        (
            "a broadcast takes the first rank's",
            "value = requests[requests[0].source].tensor.clone()",
            "value = requests[0].tensor.clone()",
            f"{COLLECTIVES}::test_broadcast_overwrites_with_the_sources",
        ),
    ),
    *planted(
        "ddp_core/_simulate.py",
        (
            "a rank that ends early is not noticed",
            "if requests and returned:",
            "if requests and len(returned) == len(ranks):",
            f"{COLLECTIVES}::test_a_rank_that_ends_early_is_told",
        ),
    ),
    *planted(
        "ddp_core/_layout.py",
        (
            "a full bucket stays open",
            "if fill[kind] >= limits[min(position, len(limits) - 1)]:",
            "if fill[kind] > limits[min(position, len(limits) - 1)]:",
            f"{LAYOUT}::test_assignment_is_that_of_torch",
        ),
        (
            "the first step launches in registration order",
            "        return buckets[::-1]\n",
            "        return buckets\n",
            f"{LAYOUT}::test_first_step_takes_reverse_registration_order",
        ),
        (
            "every bucket has the first one's limit",
            "limits[min(position, len(limits) - 1)]",
            "limits[0]",
            f"{LAYOUT}::test_assignment_is_that_of_torch",
        ),
        (
            "the last rank's buckets are everyone's",
            "dist.broadcast(message, group=group, group_src=0)",
            "dist.broadcast(message, group=group, group_src=group.size() - 1)",
            f"{CORE}::test_ranks_take_rank_0s_buckets",
        ),
    ),
    *planted(
        "ddp_core/_bucket.py",
        (
            "a bucket's parameters are its own list",
            "return list(self._parameters)",
            "return self._parameters",
            f"{UNIT}/test_bucket.py::test_changing_the_lists_it_returns_changes_nothing",
        ),
    ),
    *planted(
        "ddp_core/_flat.py",
        (
            "a whole bucket is not divided",
            "            self.buffer.mul_(1.0 / divisor)\n",
            "            pass\n",
            f"{DISTRIBUTED}/test_ddp_modes.py::test_none_is_plain_ddp_bit_for_bit",
        ),
        (
            "a parameter that no rank uses is said to have been written",
            "            if unused[slot]\n            and not (",
            "            if False\n            and not (",
            f"{DISTRIBUTED}/test_ddp_steps.py::test_a_state_hears_which_gradients_were_not_written",
        ),
    ),
    *planted(
        "ddp_core/_precision.py",
        (
            "accumulated gradients are forgotten",
            "parameter.grad = earlier.add_(grad)",
            "parameter.grad = grad.to(parameter.dtype)",
            f"{CORE}::test_mixed_precision_accumulates_in_full_precision",
        ),
        (
            "parameters stay low",
            "            parameter.data = data\n",
            "            pass\n",
            f"{CORE}::test_mixed_precision_computes_low_and_leaves_full_precision",
        ),
    ),
    *planted(
        "ddp_core/_optimizer.py",
        (
            "optimizers in backward also step with a rank's own gradient",
            "            handle.remove()\n",
            "            pass\n",
            f"{CORE}::test_optimizer_in_backward_steps_as_after_it_also_with_a_hook",
        ),
    ),
    *planted(
        "ddp_core/_join.py",
        (
            "everyone takes the model of the first that joined",
            "dist.all_reduce(choice, dist.ReduceOp.MAX, group=group)",
            "dist.all_reduce(choice, dist.ReduceOp.MIN, group=group)",
            f"{DISTRIBUTED}/test_ddp_modes.py::test_ranks_are_equal_after_join_and_further_training",
        ),
    ),
    *planted(
        "ddp_core/_pairs.py",
        (
            "rows are stored as of another rank",
            "receive[p], ranks[p]) for p in ((own - distance) % size",
            "receive[p], ranks[p]) for p in ((own + distance) % size",
            f"{DISTRIBUTED}/test_pairs.py::test_rows_arrive_where_they_belong",
        ),
    ),
]

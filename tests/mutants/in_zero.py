"""Bugs in optimizers that are sharded over ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

TEST = "tests/distributed/test_zero_optimizer.py"
BITS = f"{TEST}::test_two_ranks_have_the_bits_of_plain_training"
PAIRS = f"{TEST}::test_pairs_of_features_have_the_bits_of_plain_training"
OVERFLOW = f"{TEST}::test_a_step_that_overflows_on_one_rank_changes_nothing_on_any"
LOST = f"{TEST}::test_what_ranks_have_and_what_the_owner_keeps_are_the_exact_parameters"

MUTANTS: list[Mutant] = [
    *planted(
        "commhooks/zero/shard.py",
        (
            "a piece begins at the shard's begin within the bucket, not within the parameter",
            "entries = slice(start - offset, stop - offset)",
            "entries = slice(start - begin, stop - begin)",
            BITS,
        ),
        (
            "parameters that no rank has used are stepped",
            "if id(piece.parameter) in left_alone:",
            "if id(piece.parameter) in ():",
            f"{PAIRS}[unused]",
        ),
        (
            "a second gradient replaces the first",
            "piece.value.grad += part",
            "piece.value.grad = part",
            f"{PAIRS}[two passes]",
        ),
        (
            "loaded parameters go back to the owner's values",
            "if self._versions.get(piece.name) != piece.parameter._version:",
            "if not self._versions:",
            f"{TEST}::test_parameters_that_are_loaded_later_hold",
        ),
        (
            "moments are not taken back",
            "if state:  # an empty one",
            "if not state:  # an empty one",
            OVERFLOW,
        ),
        (
            "exact values are not taken back",
            "self.exact.copy_(exact)",
            "exact.copy_(self.exact)",
            OVERFLOW,
        ),
    ),
    *planted(
        "commhooks/zero/hook.py",
        (
            "each rank has a verdict of its own",
            "dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)",
            "dist.all_reduce(wrong.clone(), dist.ReduceOp.MAX, group=group)",
            OVERFLOW,
        ),
        (
            "a scaler sees finite gradients on the other ranks",
            "mean.fill_(torch.nan)",
            "mean",
            f"{TEST}::test_a_gradient_scaler_sees_the_verdict_of_all_ranks",
        ),
        (
            "a rank's own gradients stay where the mean is expected",
            "parameter.grad = InShards(parameter)",
            "pass",
            f"{TEST}::test_misuse_is_an_error",
        ),
    ),
    *planted(
        "commhooks/zero/gather.py",
        (
            "the owner adds its exact values, not what it sent",
            "rows = yield AllGather(payload)",
            "rows = (yield AllGather(payload)).clone(); rows[shard.rank] = rows[0]",
            f"{TEST}::test_all_ranks_have_equal_parameters_after_every_step",
        ),
        (
            "variances that grow are taken",
            "codec.error.variance > 1",
            "codec.error.variance > 1000",
            f"{TEST}::test_what_cannot_be_combined_is_refused",
        ),
    ),
    *planted(
        "commhooks/zero/shards.py",
        (
            "differences do not have what was not sent before",
            "own = shard.exact - shard.held() if self._gather.packs(shard) else shard.exact",
            "own = shard.exact - shard.exact if self._gather.packs(shard) else shard.exact",
            LOST,
        ),
        (
            "the norm is this rank's",
            "dist.all_reduce(total, op, group=self._model.process_group)",
            "dist.all_reduce(total.clone(), op, group=self._model.process_group)",
            f"{TEST}::test_clipping_by_the_norm_over_all_shards",
        ),
        (
            "all gradients are seen by the step of each bucket",
            "_show(dict.fromkeys(gradients))\n        under_way",
            "under_way",
            BITS,
        ),
        (
            "a step in backward keeps no copy",
            "shard.back_up(self.optimizer.state)",
            "pass",
            OVERFLOW,
        ),
    ),
    *planted(
        "commhooks/zero/saving.py",
        (
            "a piece takes the first entries of its parameter",
            'own = slice(begin - one["begin"], end - one["begin"])',
            "own = slice(0, end - begin)",
            f"{TEST}::test_a_gathered_state_loads_on_another_number_of_ranks",
        ),
    ),
    *planted(
        "ddp_core/reducer/reducer.py",
        (
            "buckets that should stay follow arrival",
            "self.plan.follows_arrival, self.plan.splits.ignored = False, True",
            "self.plan.splits.ignored = True",
            BITS,
        ),
    ),
]

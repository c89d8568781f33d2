"""Bugs in the verification of steps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

VERIFY = "tests/verify/test_verify.py"
LAWS = "tests/verify/test_verified_laws.py"
EQUAL = "tests/verify/test_equal_parameters.py"
NAMED = f"{EQUAL}::test_the_first_parameter_that_differs_is_named_with_its_ranks"
SHARDS = "tests/verify/test_verify_shards.py"
PLANTED = f"{VERIFY}::test_a_planted_bug_is_named_with_step_rank_and_parameter"
NORM = "tests/unit/test_sketch.py::test_a_norm_is_known_to_some_percent"
NEAR = f"{LAWS}::test_errors_of_sketches_are_near_those_of_gradients"
WHOLE = f"{SHARDS}::test_error_cosine_and_norm_are_those_of_whole_parameters"

MUTANTS: list[Mutant] = [
    *planted(
        "_measure",
        (
            "a finding is in the first bucket, wherever it is",
            "what = (number, bucket.layout,",
            "what = (0, bucket.layout,",
            PLANTED,
        ),
        (
            "a finding counts buckets as they were launched",
            "what = (number, bucket.layout,",
            "what = (len(step.measured), bucket.layout,",
            f"{SHARDS}::test_a_shard_that_is_decoded_wrongly_is_named",
        ),
    ),
    *planted(
        "_differing_averages",
        (
            "ranks that differ are not found",
            "differ = (hashes != hashes[0]).any(0)",
            "differ = (hashes != hashes).any(0)",
            PLANTED,
        ),
    ),
    *planted(
        "judge_parameters",
        (
            "parameters that differ are not found",
            "for position in (hashes != hashes[0]).any(0).nonzero()",
            "for position in (hashes != hashes).any(0).nonzero()",
            NAMED,
        ),
    ),
    *planted(
        "_dense_norms",
        (
            "the norm of the dense mean is what remains of a larger error",
            "torch.where(error < dense, summed, dense)",
            "summed",
            f"{LAWS}::test_errors_many_times_the_dense_mean_are_told_as_well",
        ),
    ),
    *planted(
        "judge",
        (
            "residuals are no part of what ranks contribute",
            "sizes = torch.sqrt((gradients.square() + residuals.square()).sum(1))",
            "sizes = torch.sqrt(gradients.square().sum(1))",
            f"{LAWS}::test_residuals_larger_than_gradients_break_no_law",
        ),
    ),
    *planted(
        "_rows_of",
        (
            "a cosine of NaN is 1",
            "torch.where(known, (dot / both).clamp(-1.0, 1.0), math.nan)",
            "torch.where(known, (dot / both).clamp(-1.0, 1.0), 1.0)",
            f"{LAWS}::test_what_is_not_finite_has_no_cosine",
        ),
    ),
    *planted(
        "_exceeded_bound",
        (
            "the bound allows any error",
            "if total <= allowed:",
            "if total <= 100 * allowed + 100:",
            PLANTED,
        ),
    ),
    *planted(
        "_signs_of",
        (
            "entries are added up without signs",
            "return first_table[first : first + size] * second_table[second : second + size]",
            "return torch.ones_like(first_table[:size])",
            f"{NORM}[constant]",
        ),
        (
            "signs are those of one table",
            "return first_table[first : first + size] * second_table[second : second + size]",
            "return first_table[first : first + size]",
            f"{NORM}[larger and constant]",
        ),
    ),
    *planted(
        "_sketches_of_rows",
        (
            "parts of a vector have the same signs",
            "signs = _signs_of(part, step, number)",
            "signs = _signs_of(part, step, 0)",
            f"{NORM}[large and constant]",
        ),
        (
            "a column of a matrix is one number of a sketch",
            "line = width + 1 + _mixed(step) % max(1, width // 8)",
            "line = width",
            f"{NORM}[column of twice the width]",
        ),
        (
            "entries behind the last whole row are left out",
            "into[:, lines, :rest] = part[:, whole:] * signs[whole:]",
            "pass",
            f"{NORM}[behind the last whole row]",
        ),
    ),
    *planted(
        "_places",
        (
            "sketches are in the order of sizes",
            "[begins[owner] for owner in owners]",
            "[begins[place] for place, _ in enumerate(owners)]",
            "tests/unit/test_sketch.py::test_the_mean_of_sketches_is_the_sketch_of_the_mean",
        ),
    ),
    *planted(
        "Measurement._sent",
        (
            "a residual that shards flush is left out",
            "residual = self._add_residual(self._difference, memory)",
            "residual = self._add_residual(self._difference.clone(), memory)",
            f"{SHARDS}::test_residuals_are_part_of_what_shards_have_to_average",
        ),
    ),
    *planted(
        "Measurement.finish",
        (
            "what the ranks have sent is sketched with the average in it",
            "[sent.sub_(flat)]",
            "[sent]",
            f"{LAWS}::test_no_registered_scheme_is_accused",
        ),
        (
            "the error is sketched before the average is subtracted",
            "        self._difference.sub_(flat)\n        difference",
            "        self._difference = self._difference - 0.5 * flat\n        difference",
            NEAR,
        ),
    ),
    *planted(
        "Measurement._keep",
        (
            "a copy of the gradient is kept beside its sketch",
            "        del self._difference\n",
            "",
            f"{LAWS}::test_no_copy_of_the_gradient_is_kept_beside_sketches",
        ),
    ),
    *planted(
        "hashes",
        (
            "chunks of a hash count alike",
            "sums.append(span_sums.mul_(2 * number + 1))",
            "sums.append(span_sums)",
            f"{EQUAL}::test_a_hash_depends_on_the_order_of_chunks",
        ),
        (
            "a hash writes to integers",
            "copy = chunk.add(0.0) if inexact else chunk.clone()",
            "copy = chunk.add(0.0) if inexact else chunk",
            f"{EQUAL}::test_a_hash_is_of_every_bit_whatever_the_dtype",
        ),
    ),
    *planted(
        "hashes_of",
        (
            "hashes are in the order of dtypes",
            "return together[order.argsort().to(device)]",
            "return together",
            f"{EQUAL}::test_a_hash_is_of_every_bit_whatever_the_dtype",
        ),
    ),
    *planted(
        "keeps_equal",
        (
            "a schedule with local steps promises equal parameters",
            "all(part.traits.agrees and part.traits.averages for part in walk(scheme))",
            "scheme.traits.agrees and scheme.traits.averages",
            f"{EQUAL}::test_schemes_that_let_ranks_go_apart_promise_nothing",
        ),
    ),
    *planted(
        "minority_ranks",
        (
            "the majority is wrong",
            "if value != usual]",
            "if value == usual]",
            NAMED,
        ),
    ),
    *planted(
        "state_of",
        (
            "an optimizer's settings may differ",
            'values[f"{key!r} of the optimizer\'s group {number}"] = value',
            "pass",
            f"{EQUAL}::test_verify_equal_names_what_differs",
        ),
    ),
    *planted(
        "values_of",
        (
            "low-precision copies of parameters are compared",
            "plain[name]: full.get(id(parameter), parameter)",
            "plain[name]: parameter",
            f"{EQUAL}::test_parameters_are_compared_in_full_precision_and_before_they_are_stepped",
        ),
    ),
    *planted(
        "register_on_fsdp2",
        (
            "replicas of a shard are not compared",
            "    if replicate_group is not None:\n        rank = shards.rank()",
            "    if False:\n        rank = shards.rank()",
            f"{EQUAL}::test_replicas_of_a_shard_are_compared_with_each_other",
        ),
    ),
    *planted(
        "ShardMeasurement.finish",
        (
            "a rank subtracts its own share of the average only",
            "error[begin:end].sub_(flat, alpha=ranks)",
            "error[begin:end].sub_(flat)",
            WHOLE,
        ),
    ),
    *planted(
        "ShardMeasurement.compared",
        (
            "the error counts twice in a shard's cosine",
            "dots_of(average, difference, sizes)",
            "dots_of(dense, difference, sizes)",
            WHOLE,
        ),
        (
            "the norm of a shard's dense mean is what remains of a larger error",
            "torch.where(error < norm, mean + 2 * near + error, norm)",
            "(mean + 2 * near + error)",
            f"{SHARDS}::test_errors_many_times_the_dense_mean_are_told_as_well",
        ),
    ),
    *planted(
        "_VerifiedStep.__init__",
        (
            "sketches are added up, and not averaged",
            "requests.append(AllReduce(self._sketches))",
            'requests.append(AllReduce(self._sketches, "sum"))',
            NEAR,
        ),
    ),
    *planted(
        "Running._facts",
        (
            "ranks may do other things about what they find",
            'getattr(self.verification, "action", None)',
            "None",
            "tests/hook/test_handshake.py::test_every_field_that_differs_is_named",
        ),
    ),
    *planted(
        "Verification.on_first_bucket",
        (
            "parameters are compared after a scheme that lets them differ",
            "self._apart = self._apart or not keeps_equal(scheme)",
            "self._apart = not keeps_equal(scheme)",
            f"{EQUAL}::test_schemes_that_let_ranks_go_apart_promise_nothing",
        ),
    ),
    *planted(
        "Verification.open",
        (
            "a hook that is dropped tells of no finding",
            "self._cancel_finalizer = weakref.finalize(owner, self.close).detach",
            "self._cancel_finalizer = _nothing",
            f"{VERIFY}::test_a_finding_in_the_last_step_is_told_however_a_hook_ends",
        ),
    ),
    *planted(
        "Verification.close",
        (
            "a finding that was looked at is not told when a hook closes",
            '_warn_findings(self._unraised_findings, self._group.rank(), "warn", self._warned)',
            "pass",
            f"{VERIFY}::test_a_finding_in_the_last_step_is_told_however_a_hook_ends",
        ),
        (
            "closing waits for a late peer",
            "self._lane_group.discard(works)  # waits",
            "self._lane_group.release()  # waits",
            f"{VERIFY}::test_a_hook_closes_without_a_peer_that_is_late",
        ),
        (
            "closing raises where a peer has failed",
            "with contextlib.suppress(CollectiveError):",
            "if True:",
            f"{VERIFY}::test_a_hook_closes_where_a_peer_failed_in_the_verification",
        ),
    ),
    *planted(
        "Difference.is_impossible",
        (
            "sending less may take longer",
            "return self.seconds < -max(self.noise_s, _SMALL * kind.median_s)",
            "return False",
            "tests/unit/test_headroom.py::test_steps_that_send_less_and_take_longer_are_no_answer",
        ),
    ),
]

"""Bugs in ``commhooks/schemes``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

UNIT = "tests/unit"
LAWS = "tests/contract/test_conformance.py::test_registered_schemes_obey_every_law"
FEEDBACK = f"{UNIT}/test_references_feedback.py"
LOW_RANK = f"{UNIT}/test_low_rank_schemes.py"
POLICIES = f"{UNIT}/test_references_policies.py"
MOMENTUM = f"{UNIT}/test_momentum_schemes.py"
EDEN = f"{UNIT}/test_eden.py"
GOSSIP = f"{UNIT}/test_gossip.py"
INTEGER = f"{UNIT}/test_integer_sum.py"

MUTANTS: list[Mutant] = [
    *planted(
        "_decoded",
        (
            "random levels arrive a 256th too large",
            "dequantize(payload[None], out, format, block, segments=segments)",
            "dequantize(payload[None], out, format, block, segments=segments, factor=1.00390625)",
            f"{LAWS}[qsgd]",
        ),
    ),
    *planted(
        "TernGrad.encode",
        (
            "TernGrad rounds to nearest",
            'quantize(_in_float32(gradient), payload, "int2", self.block, random=random)',
            'quantize(_in_float32(gradient), payload, "int2", self.block)',
            f"{LAWS}[terngrad]",
        ),
    ),
    *planted(
        "QSGD.encode",
        (
            "ranks round to levels alike",
            'random = bucket.random("qsgd", shared=False)',
            'random = bucket.random("qsgd", shared=True)',
            f"{UNIT}/test_quantized.py::test_ranks_round_to_random_levels_independently",
        ),
    ),
    *planted(
        "OneBitMomentum.exchange",
        (
            "1-bit Adam switches a step late",
            "if bucket.step < self.freeze_step:",
            "if bucket.step <= self.freeze_step:",
            f"{POLICIES}::test_onebit_adam_sends_gradients_and_then_momenta",
        ),
        (
            "1-bit Adam's momentum has its weights swapped",
            "momentum = torch.lerp(bucket.gradient.to(dtype), old, self.beta1)",
            "momentum = torch.lerp(old, bucket.gradient.to(dtype), self.beta1)",
            f"{POLICIES}::test_onebit_adam_sends_gradients_and_then_momenta",
        ),
    ),
    *planted(
        "number_kept",
        (
            "top-k sends half of its entries",
            "return min(n, max(1, int(ratio * n)))",
            "return min(n, max(1, int(ratio * n) // 2))",
            f"{FEEDBACK}::test_topk_with_feedback",
        ),
    ),
    *planted(
        "AlignedTopK._directions",
        (
            "AlignedTopK draws the same sketch each step",
            'bucket.generator(f"{bucket.layout.names[0]}/sketch", shared=True)',
            'bucket.generator(f"{bucket.layout.names[0]}/sketch", shared=True, step=0)',
            f"{POLICIES}::test_aligned_topk",
        ),
    ),
    *planted(
        "AlignedTopK.gather",
        (
            "AlignedTopK keeps what it sends",
            "others = rows.index_fill(0, indices, 0.0).view(-1)",
            "others = rows.view(-1)",
            f"{POLICIES}::test_aligned_topk",
        ),
    ),
    *planted(
        "RandomBlock.gather",
        (
            "a random block keeps what it sends",
            "                piece.zero_()\n",
            "                pass\n",
            f"{POLICIES}::test_a_random_block_sends_one_stretch_and_holds_the_rest",
        ),
    ),
    *planted(
        "_MOST",
        (
            "EDEN declares what dense gradients lose",
            "_MOST = (2.0, 0.45, 0.11, 0.029)",
            "_MOST = (0.571, 0.133, 0.0358, 0.0096)",
            f"{EDEN}::test_no_sparse_block_exceeds_the_variance",
        ),
    ),
    *planted(
        "Eden.encode",
        (
            "EDEN says nothing is left",
            "        if piece.unsent is not None:\n            hadamard(",
            "        if piece.unsent is not None:\n            piece.unsent.zero_()\n"
            "        if piece.unsent is None:\n            hadamard(",
            f"{FEEDBACK}::test_scaled_sends_a_share_and_keeps_the_rest",
        ),
    ),
    *planted(
        "DGC.exchange",
        (
            "DGC keeps the momentum of what it sends",
            "u.masked_fill_(unsent != v, 0.0)",
            "u",
            f"{MOMENTUM}::test_dgc_is_what_the_paper_says",
        ),
    ),
    *planted(
        "DGC._clipped",
        (
            "DGC clips to the norm of all ranks",
            "most = self.clip / math.sqrt(bucket.world_size)",
            "most = self.clip",
            f"{MOMENTUM}::test_dgc_is_what_the_paper_says",
        ),
    ),
    *planted(
        "DenseMomentum.exchange",
        (
            "DenseMomentum is Nesterov's where it should not be",
            "mean + self.momentum * new if self.nesterov else new",
            "mean + self.momentum * new",
            f"{MOMENTUM}::test_dense_momentum_is_that_of_torch",
        ),
    ),
    *planted(
        "DeMo.exchange",
        (
            "DeMo's momentum does not decay",
            "bucket.gradient.to(torch.float32) + self.decay * old",
            "bucket.gradient.to(torch.float32) + old",
            f"{MOMENTUM}::test_demo_is_what_the_paper_says",
        ),
        (
            "DeMo divides by all ranks",
            "(total / count.clamp(min=1.0))",
            "(total / bucket.world_size)",
            f"{MOMENTUM}::test_demo_is_what_the_paper_says",
        ),
    ),
    *planted(
        "average_factor.keep_unsent",
        (
            "low-rank schemes keep the difference to the mean, not to a rank's own share",
            "factor, tail = local_copy, None",
            "factor, tail = payload[: local_copy.numel()], None",
            f"{LOW_RANK}::test_powersgd",
        ),
        (
            "left and right factors of what was sent are swapped",
            "(factor, other) if is_left else (other, factor)",
            "(factor, other) if not is_left else (other, factor)",
            f"{LOW_RANK}::test_acpsgd",
        ),
    ),
    *planted(
        "PowerSGD.exchange",
        (
            "PowerSGD does not orthonormalise",
            "        orthonormalize(matrices, left)  # the same bits on every rank\n",
            "",
            f"{LOW_RANK}::test_powersgd",
        ),
        (
            "PowerSGD forgets its factor",
            "            bucket.write(self.keeps[0], q)\n",
            "            pass\n",
            f"{LOW_RANK}::test_powersgd",
        ),
    ),
    *planted(
        "ACPSGD.exchange",
        (
            "ACP-SGD begins with the other factor",
            "even = bucket.step % 2 == 0",
            "even = bucket.step % 2 == 1",
            f"{LOW_RANK}::test_acpsgd",
        ),
    ),
    *planted(
        "BatchedPowerSGD.exchange.keep_unsent",
        (
            "feedback of one matrix misses the rounding of a cast",
            "sent = local_copy if second.sent is None else second.sent",
            "sent = local_copy",
            f"{UNIT}/test_wrappers.py::test_feedback_knows_what_a_cast_rounds",
        ),
        (
            "the batched scheme keeps twice what is left of its residual",
            "alpha=-1)",
            "alpha=-0.5)",
            f"{LOW_RANK}::test_batched_powersgd",
        ),
    ),
    *planted(
        "GlobalQSGD.exchange",
        (
            "sums of codes wrap",
            "n, levels, block = bucket.raw.numel(), _TOP // bucket.world_size, self.block",
            "n, levels, block = bucket.raw.numel(), _TOP, self.block",
            f"{INTEGER}::test_the_sum_of_codes_never_wraps",
        ),
    ),
    *planted(
        "factory_of",
        (
            "a name that an import registers is one that nobody knows",
            "if name.lower() in BASELINES:",
            "if name in ():",
            f"{UNIT}/test_registry.py::test_baselines_are_registered_by_their_import",
        ),
    ),
    *planted(
        "GlobalQSGD.error_growth",
        (
            "a scale of several ranks is as fine as one of a rank",
            "return (_TOP / max(_TOP // world_size, 1)) ** 2",
            "return 1.0",
            "tests/verify/test_verified_laws.py"
            "::test_a_law_allows_what_a_scale_of_several_ranks_or_steps_loses",
        ),
    ),
    *planted(
        "fp8",
        (
            "MX takes blocks of any size",
            "if block not in (None, 32) or rounding",
            "if rounding",
            f"{UNIT}/test_quantized.py"
            "::test_mx_is_a_format_of_fp8_with_blocks_and_rounding_of_its_own",
        ),
    ),
    *planted(
        "IntSGD._remember",
        (
            "IntSGD's average has its weights swapped",
            "new = torch.lerp(new, bucket.read(_NORM), self.decay)",
            "new = torch.lerp(bucket.read(_NORM), new, self.decay)",
            f"{INTEGER}::test_adaptive_levels_are_as_in_the_paper",
        ),
    ),
    *planted(
        "SignSGD.repack_shard",
        (
            "votes are counted with the wrong sign in the middle",
            "count_votes(received, total, self.scale, shard=length)",
            "count_votes(received, total, -self.scale, shard=length)",
            f"{MOMENTUM}::test_signs_of_a_tie_are_positive_everywhere",
        ),
    ),
    *planted(
        "partner_of",
        (
            "gossip meets the same partner each step",
            "rank ^ (1 << step % bits)",
            "rank ^ 1",
            f"{GOSSIP}::test_a_gradient_reaches_all_of_2_to_the_k_ranks_alike_in_k_steps",
        ),
    ),
    *planted(
        "Gossip.exchange",
        (
            "gossip averages gradients only",
            "half = (given + gradient).mul_(0.5)",
            "half = given * 0.5 + gradient * 0.5 - given * 0.5",
            f"{GOSSIP}::test_the_law_holds_bit_for_bit",
        ),
    ),
    *planted(
        "Hierarchical.exchange",
        (
            "ranks of a node dither as in the whole world",
            '"inside/", member=(local_rank, local))',
            '"inside/")',
            f"{UNIT}/test_hierarchical.py::test_both_levels_decode_the_dither_of_their_own_ranks",
        ),
        (
            "nodes dither as ranks do",
            "purpose, member=(node, nodes))",
            "purpose)",
            f"{UNIT}/test_hierarchical.py::test_both_levels_decode_the_dither_of_their_own_ranks",
        ),
    ),
    *planted(
        "Blockwise.repack_shard",
        (
            "both phases are decoded with the dither of the second",
            "received=self._draws(random.first),",
            "received=self._draws(random),",
            f"{UNIT}/test_quantized.py::test_two_phases_cost_what_their_law_says",
        ),
        (
            "the second rounding of rotated blocks is left rotated",
            "            error.add_(back)",
            "            error.add_(into[: len(back)])",
            f"{FEEDBACK}::test_int4_with_feedback",
        ),
        (
            "the mean of five ranks in two phases is of six",
            "factor=1.0 / len(received),",
            "factor=1.0 / (len(received) + (len(received) == 5)),",
            f"{FEEDBACK}::test_onebit_with_feedback",
        ),
        (
            "a shard's mean is packed with the noise of the first shard",
            "segments, row, random = shards.segments, index, random.row(index)",
            "segments, row, random = shards.segments, index, random.row(0)",
            f"{LAWS}[int4]",
        ),
        (
            "the error of a mean is kept once and not for all ranks",
            "weight=float(weight),",
            "weight=1.0,",
            f"{FEEDBACK}::test_onebit_with_feedback",
        ),
    ),
    *planted(
        "Blockwise.encode",
        (
            "no rank shifts its dither",
            "                rank=rank,\n",
            "",
            f"{UNIT}/test_quantized.py::test_errors_of_equal_gradients_cancel_with_a_dither",
        ),
    ),
    *planted(
        "Bucket.in_float32",
        (
            "a float64 gradient is packed without its residual",
            "raw = self.gradient.float()",
            "raw = self.raw.float()",
            f"{UNIT}/test_wrappers.py::test_the_residual_of_a_float64_gradient_is_sent",
        ),
    ),
    *planted(
        "Memory._without",
        (
            "a flush removes what is kept of a parameter that was left alone",
            "            flat = torch.zeros_like(before)\n",
            "            return None\n",
            f"{UNIT}/test_memory.py"
            "::test_a_flush_leaves_what_is_kept_of_a_parameter_that_was_left_alone",
        ),
    ),
    *planted(
        "Memory.commit",
        (
            "a buffer that is kept is the next scratch",
            "old.shape == flat.shape and not share_storage(flat, old)",
            "old.shape == flat.shape",
            f"{UNIT}/test_memory.py::test_a_scratch_is_not_what_was_read_and_written_back",
        ),
    ),
    *planted(
        "_spare",
        (
            "a buffer that is kept after a bad step is the next scratch",
            "        if not share_storage(flat, kept.flat.get(place)):\n",
            "        if True:\n",
            f"{UNIT}/test_memory.py::test_a_scratch_is_not_what_was_read_and_written_back",
        ),
    ),
    *planted(
        "TwoPhaseCast._cast",
        (
            "16-bit roundings are the same on all ranks",
            "random=random.noise",
            "random=random.shared",
            f"{UNIT}/test_shard_collectives.py"
            "::test_random_roundings_of_equal_gradients_average_out_over_ranks",
        ),
    ),
    *planted(
        "TwoPhaseCast.pack",
        (
            "the padding of a 16-bit payload is whatever was there",
            "        narrow[n:].zero_()  # padding travels, too: the same bytes in every run\n",
            "",
            f"{UNIT}/test_shard_collectives.py::test_all_bytes_of_a_payload_of_16_bits_are_written",
        ),
    ),
    *planted(
        "Guard._judge",
        (
            "the moving average of the guard has its weights swapped",
            "0.8 * before + 0.2 * value",
            "0.2 * before + 0.8 * value",
            f"{UNIT}/test_policies.py"
            "::test_growth_is_that_over_a_moving_average_from_the_fourth_measurement_on",
        ),
        (
            "growth is judged from the third measurement on",
            "if looks >= 3 and before > 0",
            "if looks >= 2 and before > 0",
            f"{UNIT}/test_policies.py"
            "::test_growth_is_that_over_a_moving_average_from_the_fourth_measurement_on",
        ),
    ),
    *planted(
        "_less_own",
        (
            "a rank subtracts its shard of the mean for itself only",
            "-= bucket.world_size * mean[",
            "-= mean[",
            f"{UNIT}/test_shard_collectives.py::test_guard_measures_the_error_of_shards",
        ),
    ),
    *planted(
        "quantization_perchannel_hook",
        (
            "blocks of quantisation per channel have the size of the default",
            "MinMaxPerChannel(bucket_size)",
            "MinMaxPerChannel()",
            f"{UNIT}/test_attachment.py"
            "::test_quantization_per_channel_is_by_blocks_of_the_size_that_is_told",
        ),
    ),
    *planted(
        "PowerSGDState.maybe_increase_iter",
        (
            "a hook of one's own counts buckets, not steps",
            "if bucket.is_last() and not self._on_models.inners:",
            "if not self._on_models.inners:",
            "tests/ddp/test_classic.py::test_a_hook_of_ones_own_counts_steps_in_the_state",
        ),
    ),
]

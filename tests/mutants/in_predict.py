"""Bugs in predictions, in what they advise, and in the verification of schemes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

UNIT = "tests/unit"
ADVISE, HEADROOM, AUTO = (
    f"{UNIT}/test_advise.py",
    f"{UNIT}/test_headroom.py",
    "tests/predict/test_auto.py",
)
FAR = "tests/predict/test_link.py::test_a_long_delay_leaves_the_bandwidth_known"

MUTANTS: list[Mutant] = [
    *planted(
        "pipelined",
        (
            "work beside a message delays it",
            "begin = np.maximum(link_free, sends)",
            "begin = np.maximum(link_free, device_free)",
            f"{UNIT}/test_simulate.py::test_cases_of_different_sizes_do_not_disturb_each_other",
        ),
    ),
    *planted(
        "advise",
        (
            "the budget of error is not kept",
            "if errors[name] <= max_error or name",
            "if errors[name] >= max_error or name",
            f"{ADVISE}::test_options_keep_to_the_budget_and_dense_is_always_one",
        ),
    ),
    *planted(
        "AutoHook.load_state_dict",
        (
            "a run that stopped before the decision keeps what it tried",
            'if plan.get("undecided"):',
            'if plan.get("undecided") is None:',
            f"{AUTO}::test_a_run_that_stopped_before_the_decision_searches_anew",
        ),
    ),
    *planted(
        "AutoHook._saved_choice",
        (
            "a candidate of the same class is taken for the saved one",
            "if describe(scheme) == saved:",
            'if describe(scheme).partition("(")[0] == saved.partition("(")[0]:',
            f"{AUTO}::test_a_resumed_run_has_the_settings_that_were_chosen",
        ),
    ),
    *planted(
        "Trials._keep_or_compare_again",
        (
            "a choice that has become slower is kept",
            "if seconds <= self._dense_s:",
            "if seconds <= 2 * self._dense_s:",
            f"{AUTO}::test_a_choice_that_seems_to_have_lost_is_raced_against_dense_steps",
        ),
    ),
    *planted(
        "_SAME",
        (
            "auto takes a scheme that is 2 % slower",
            "_SAME = 0.01",
            "_SAME = 0.02",
            f"{AUTO}::test_the_fastest_is_kept_unless_dense_or_a_more_exact_one_is_as_fast",
        ),
    ),
    *planted(
        "pipelined",
        (
            "first and later computations take the same from backward",
            "np.where(number == 0, contention.first, contention.later)",
            "contention.first",
            "tests/unit/test_simulate.py::test_cases_of_different_sizes_do_not_disturb_each_other",
        ),
        (
            "moving bytes takes from backward what computing does",
            "contention.moving * core[at, case]",
            "contention.later * core[at, case]",
            "tests/unit/test_simulate.py::test_cases_of_different_sizes_do_not_disturb_each_other",
        ),
    ),
    *planted(
        "advise",
        (
            "the first bucket of an advice has 1 MiB",
            "cap_mb if first_mb is None else first_mb",
            "first_mb or 1.0",
            f"{ADVISE}::test_the_first_bucket_is_as_large_as_bucket_cap_mb_makes_it",
        ),
    ),
    *planted(
        "_share_on_gpu",
        (
            "the side's stream queues behind the step's",
            "priority=-1",
            "priority=0",
            "tests/unit/test_contention.py::test_on_a_gpu_two_streams_are_compared",
        ),
    ),
    *planted(
        "_Side.__exit__",
        (
            "an error on the side is lost",
            "raise self._error",
            "return",
            "tests/unit/test_contention.py"
            "::test_an_error_on_the_side_is_raised_and_no_thread_is_left",
        ),
    ),
    *planted(
        "CandidateTimings._end_round",
        (
            "noise decides a race",
            "if slower > max(noise, _CLOSE * best.median):",
            "if slower > _CLOSE * best.median:",
            "tests/unit/test_race.py::test_noise_does_not_decide",
        ),
        (
            "the order of turns is never reversed",
            "if self._rounds % 2:",
            "if self._rounds > 9:",
            "tests/unit/test_race.py::test_the_order_of_turns_is_reversed_in_every_second_round",
        ),
        (
            "with few steps nothing is known to be slower",
            "min(_SURE * math.hypot(entry.deviation, best.deviation), best.median)",
            "_SURE * math.hypot(entry.deviation, best.deviation)",
            "tests/unit/test_race.py"
            "::test_with_few_steps_only_what_takes_twice_as_long_is_known_to_be_slower",
        ),
        (
            "a race has a round more",
            "self._rounds < _MAX_ROUNDS",
            "self._rounds <= _MAX_ROUNDS",
            "tests/unit/test_race.py::test_a_race_that_noise_never_lets_end_ends_after_six_rounds",
        ),
        (
            "candidates that have lost run again",
            "self._order = [entry for entry in self.entries if entry.runs]",
            "self._order = list(self.entries)",
            "tests/unit/test_race.py::test_close_ones_run_again_under_noise_and_slow_ones_do_not",
        ),
    ),
    *planted(
        "_CLOSE",
        (
            "a race ends when differences of 2 % are known",
            "_CLOSE = 0.01",
            "_CLOSE = 0.02",
            "tests/unit/test_race.py::test_without_noise_one_round_decides",
        ),
    ),
    *planted(
        "CandidateTiming.deviation",
        (
            "many steps are as noisy as few",
            "return 1.48 * 1.25 * spread / math.sqrt(len(self.times))",
            "return 1.48 * 1.25 * spread",
            "tests/unit/test_race.py::test_the_error_of_a_median_shrinks_with_the_number_of_steps",
        ),
    ),
    *planted(
        "Trials._times_of_slowest",
        (
            "a step takes as long as on the fastest rank",
            "return [float(max(ranks)) for ranks in",
            "return [float(min(ranks)) for ranks in",
            f"{AUTO}::test_a_step_takes_as_long_as_on_its_slowest_rank",
        ),
    ),
    *planted(
        "Trials._step_begins",
        (
            "steps that warm up are timed",
            "if before == self._hook.step - 1 and since > 2:",
            "if before == self._hook.step - 1:",
            f"{AUTO}::test_two_steps_warm_up_and_are_not_timed",
        ),
    ),
    *planted(
        "_Measurement._choose_sizes",
        (
            "a long delay ends the measurement before the bandwidth shows",
            " and (shows_bandwidth or size.elapsed_s > _MAX_OVER_BUDGET * self._budget)",
            "",
            FAR,
        ),
        (
            "the smallest sizes seem to show the bandwidth",
            "seconds >= _SHOWS_BANDWIDTH * sum(by_nbytes[_SIZES[0]].seconds)",
            "seconds >= sum(by_nbytes[_SIZES[0]].seconds)",
            FAR,
        ),
    ),
    *planted(
        "_Measurement._max_over_ranks",
        (
            "times are the mean over ranks",
            'AllReduce(tensor, "max").issue(self._parts[-1].group).wait()',
            'AllReduce(tensor, "mean").issue(self._parts[-1].group).wait()',
            FAR,
        ),
    ),
    *planted(
        "_Measurement._node_of_each_rank",
        (
            "ranks are counted as on every other node",
            'f"node {global_rank // int(local)}"',
            'f"node {global_rank % int(local)}"',
            "tests/predict/test_link.py::test_nodes_are_told_by_torchruns_number_of_local_ranks",
        ),
    ),
    *planted(
        "Workload.accumulated",
        (
            "each of several passes has an optimizer step",
            "(passes - 1) * (self.forward_s + self.backward_s)",
            "(passes - 1) * self.compute_s",
            f"{UNIT}/test_simulate.py::test_accumulation_adds_passes_and_exposes_as_much",
        ),
    ),
    *planted(
        "ThisDevice.parts",
        (
            "schemes are timed with messages of all ranks",
            "self._rates(scheme, min(ranks, _RANKS))",
            "self._rates(scheme, ranks)",
            f"{UNIT}/test_timed_codecs.py::test_messages_of_many_ranks_are_not_all_in_memory",
        ),
    ),
    *planted(
        "_moments",
        (
            "the time of a part begins before the message",
            "            begin = leave()\n            request",
            "            leave()\n            request",
            f"{UNIT}/test_timed_codecs.py::test_the_parts_of_an_exchange_are_timed_apart",
        ),
    ),
    *planted(
        "Difference.is_large",
        (
            "what is within the noise counts",
            "self.seconds > max(self.noise_s, _SMALL * kind.median_s)",
            "self.seconds > _SMALL * kind.median_s",
            f"{HEADROOM}::test_noise_is_no_reason_to_say_do_not_compress",
        ),
    ),
    *planted(
        "_fit_link.distance",
        (
            "one odd time moves the fit",
            "np.abs(np.log(_model_seconds(layout, part, name, sizes, fabric)) - logs).sum()",
            "((_model_seconds(layout, part, name, sizes, fabric) - np.exp(logs)) ** 2).sum()",
            f"{UNIT}/test_link.py::test_a_few_odd_times_move_nothing",
        ),
    ),
    *planted(
        "fit_fabric",
        (
            "one rank of each node tells the bandwidth of all",
            "max(one_rank_per_node.bandwidth, all_ranks.bandwidth)",
            "one_rank_per_node.bandwidth",
            f"{UNIT}/test_link.py::test_links_inside_and_between_nodes_are_told_apart",
        ),
    ),
    *planted(
        "pipelined",
        (
            "links carry two messages at once",
            "begin = np.maximum(link_free, sends)",
            "begin = sends",
            f"{UNIT}/test_simulate.py::"
            "test_all_steps_at_once_are_those_of_single_predictions_and_of_the_plain_rule",
        ),
        (
            "any number of all-reduces run at once in a lane",
            "free, takes_place = places[lane, place, case], ~last & limited[at, case]",
            "free, takes_place = places[lane, place, case], np.zeros_like(last)",
            f"{UNIT}/test_simulate.py::test_two_all_reduces_run_at_once_in_a_lane",
        ),
        (
            "the links carry nothing else while a message is on its way",
            "arrived = sent + latency",
            "arrived = link_free = sent + latency",
            f"{UNIT}/test_simulate.py::"
            "test_messages_between_pairs_share_the_latency_and_bytes_follow_each_other",
        ),
    ),
    *planted(
        "_gloo_all_reduce",
        (
            "Gloo sends all segments at once",
            "np.maximum(pairs - 1, 0)",
            "np.zeros_like(pairs)",
            f"{UNIT}/test_predicted_collectives.py::"
            "test_gloo_has_two_segments_of_an_all_reduce_under_way",
        ),
    ),
    *planted(
        "overlap_of",
        (
            "messages that follow each other are taken to share their latency",
            "2 - statistics.median(both / alone",
            "3 - statistics.median(both / alone",
            f"{UNIT}/test_link.py::"
            "test_two_messages_at_once_tell_what_share_of_the_latency_they_have_in_common",
        ),
    ),
    *planted(
        "fabrics_of",
        (
            "two files of commhooks link keep the one name that both have",
            "if names.count(network.name) > 1 else network",
            "if False else network",
            f"{UNIT}/test_simulate.py::test_two_files_of_link_are_told_apart",
        ),
    ),
    *planted(
        "Trials.candidates",
        (
            "a second race is taken for the first",
            "self._timings.entries if self._before is None else self._before",
            "self._timings.entries",
            f"{UNIT}/test_report.py::test_a_page_tells_what_was_measured_of_candidates",
        ),
    ),
    *planted(
        "Trials._end_stage",
        (
            "the first steps of a run count",
            "if self._stage is Stage.TRIAL:",
            "if True:",
            f"{AUTO}::test_the_first_steps_of_a_run_do_not_count",
        ),
    ),
    *planted(
        "AutoHook._facts",
        (
            "ranks may race other candidates",
            '{"candidates": self._allowed}',
            "{}",
            f"{AUTO}::test_ranks_that_would_race_other_candidates_are_told",
        ),
    ),
]

"""Bugs in the modules of frameworks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

HOSTED = "tests/distributed/test_hosted.py"

MUTANTS: list[Mutant] = [
    *planted(
        "commhooks/hosts/hosted.py",
        (
            "rank 0 saves its own state only",
            "return self._hook.state_dict(gather=True, to=self._to)",
            "return self._hook.state_dict()",
            f"{HOSTED}::test_rank_0_has_the_state_of_all_and_everyone_goes_on_from_it",
        ),
        (
            "a state that came before the hook is dropped",
            "            self._hook.load_state_dict(self._held)\n",
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
        "commhooks/hosts/accelerate.py",
        (
            "a function as comm_hook is ignored here, too",
            'if getattr(given, "value", given) not in (None, "no"):',
            'if getattr(given, "value", None) not in (None, "no"):',
            f"{HOSTED}::test_fabric_accelerate_and_ray_are_asked_for_what_they_have",
        ),
        (
            "nodes that keep a copy keep an empty one",
            "            self._to = None",
            "            self._to = 0",
            f"{HOSTED}::test_every_rank_has_the_state_where_each_node_saves_a_copy",
        ),
    ),
    *planted(
        "commhooks/hosts/lightning.py",
        (
            "the hook that Lightning leaves out on a CPU passes",
            'if stage == "fit" and getattr(',
            'if stage != "fit" and getattr(',
            f"{HOSTED}::test_lightning_by_what_it_has_published",
        ),
    ),
    *planted(
        "commhooks/hosts/transformers.py",
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
]

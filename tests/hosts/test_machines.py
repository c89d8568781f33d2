"""The lines of the page on several machines, between network namespaces with links of 1 Gbit/s."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from experiments.tools import namespaces

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "guides" / "machines.md"
SCRIPT = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINES = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
REGISTERS = 'hook = commhooks.register(ddp_model, "int8")\n'
OUTPUT: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
SECONDS = 420.0  # for three jobs, one after the other: 24 processes that import torch


@pytest.mark.parametrize("page", ["guides/machines.md", "guides/elastic.md", "quickstart.md"])
def test_torchrun_has_the_options_of_the_page(page: str) -> None:
    text = (DOCS / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"^.*?\btorchrun (--.*?)(?: *#.*|')?$", text, re.MULTILINE)
    assert commands
    for command in commands:
        words = re.sub(r"\$\w+", "1", command)
        chosen, unknown = get_args_parser().parse_known_args(shlex.split(words))
        assert chosen.training_script.endswith((".py", "commhooks")), command
        assert not unknown, command


def _scripts() -> tuple[str, str]:
    """Returns the script of the quickstart, without its hook and for 200 steps, and as it is."""
    script = SCRIPT.findall((DOCS / "quickstart.md").read_text())[0]
    assert REGISTERS in script
    script += "dist.destroy_process_group()\n"
    plain = script.replace(REGISTERS, "").replace("range(20)", "range(200)")
    return plain.replace("print(hook.summary())", "print(step)"), script


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 40)
def test_the_lines_of_the_page_train_on_four_machines(tmp_path: Path) -> None:
    if reason := namespaces.reason_not_to_run():
        pytest.skip(reason)
    plain, hooked = _scripts()
    names, link, headroom, train = LINES
    assert "I=0" in names
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    with namespaces.made_hosts("1gbit", 4) as enter:
        jobs = []
        for number, host in enumerate(enter):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "train.py").write_text(plain)
            (folder / "hooked.py").write_text(hooked)
            numbered = names.replace("I=0", f"I={number}")
            lines = ["set -e", numbered, link, headroom, "mv hooked.py train.py", train]
            shell = [*host, "timeout", f"{SECONDS:.0f}", "bash", "-c", "\n".join(lines)]
            jobs.append(subprocess.Popen(shell, env=environment, cwd=folder, **OUTPUT))
        printed = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4, "\n".join(printed)
    assert "4 ranks on 4 nodes, cpu tensors over gloo" in printed[0]
    assert (tmp_path / "0" / "link.json").exists()
    assert "commhooks headroom: 4 ranks over gloo" in printed[0]
    assert re.search(r"int8 on 4 ranks, .*: a quarter \(1/3\.\d+\)", printed[0])
    assert not [text for text in printed[1:] if "int8 on 4 ranks" in text]

"""Every scheme runs on every host, or is refused for the reason that the page gives."""

from __future__ import annotations

import itertools

import pytest

from tests.hosts import host_matrix

# Of each mechanism one host at every run; the others before a release.
QUICK = {
    *("FSDP2", "HSDP, between nodes", "`process_group`", "`ZeroOptimizer`"),
    "`gather_parameters` (FSDP2)",
}
HOSTS = [
    pytest.param(host, marks=[] if host in QUICK else [pytest.mark.slow])
    for host in host_matrix.HOSTS
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_runs_what_the_page_says(host: str) -> None:
    world_size = host_matrix.HOSTS[host][1]
    ranks = host_matrix.run_ranks(
        host_matrix.outcomes, world_size, host, timeout=120, ignore_warnings=(".*",)
    )
    lines = host_matrix.PAGE.read_text(encoding="utf-8").splitlines()
    (table,) = [name for name, hosts in host_matrix.TABLES.items() if host in hosts]
    begin = lines.index(f"### {table}") + 2
    header, _, *rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    column = [cell.strip() for cell in header.split("|")].index(host)
    told = {row.split("|")[1].strip().strip("`"): row.split("|")[column].strip() for row in rows}
    reasons = [line for line in lines if line[:1].isdigit()]
    for name, text in ranks[0].items():
        assert all(bool(one[name]) == bool(text) for one in ranks), (name, text)
        if not text:
            assert told[name] == "✓", name
            continue
        key = host_matrix.reason_of(text)
        assert key, f"{name}: {text}"
        assert host_matrix.REASONS[key][1] in reasons[int(told[name]) - 1]
    assert told.keys() == ranks[0].keys()

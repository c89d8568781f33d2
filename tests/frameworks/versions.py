"""Writes which version of each framework passed its tests, and on which day, to the matrix page.

``make test-frameworks`` runs ``python -m tests.frameworks.versions`` after all tests have passed.
"""

from __future__ import annotations

from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "matrix.md"
# By package: what the page calls it.
FRAMEWORKS = {
    "lightning": "[Lightning](lightning.md), [Lightning Fabric](fabric.md)",
    "accelerate": "[Accelerate](accelerate.md)",
    "transformers": "[the Trainer of Transformers](transformers.md)",
    "ray": "[Ray Train](ray.md)",
    "megatron-core": "[Megatron-Core](megatron.md)",
    "torchft-nightly": "[torchft](torchft.md)",
}
_END = "<!-- end -->"


def row_of(package: str) -> str:
    """Returns where the row of a framework begins."""
    return f"| {FRAMEWORKS[package]} | `{package}` |"


def updated(page: str, versions: dict[str, str], torch: str, day: str) -> str:
    """Returns the page with new rows of frameworks.

    Args:
        page: Markdown with a row for each framework.
        versions: by package.
        torch: the version of torch that they ran with.
        day: the day of the run.
    """
    lines = page.splitlines()
    for package, number in versions.items():
        (place,) = (n for n, line in enumerate(lines) if line.startswith(row_of(package)))
        lines[place] = f"{row_of(package)} {number} | {torch} | {day} |"
    return "\n".join(lines) + "\n"


def section(page: str) -> list[str]:
    """Returns the lines of the page from the heading of the table to its end."""
    lines = page.splitlines()
    return lines[lines.index("## Frameworks") : lines.index(_END) + 1]


if __name__ == "__main__":
    results = {}
    for name in FRAMEWORKS:
        try:
            results[name] = version(name)
        except PackageNotFoundError:  # its tests were skipped
            print(f"{name} is not installed: its row stays")
    text = PAGE.read_text(encoding="utf-8")
    torch_version = version("torch").partition("+")[0]
    text = updated(text, results, torch_version, date.today().isoformat())
    PAGE.write_text(text, encoding="utf-8")
    print(*section(text), sep="\n")

"""``python -m tests.house [--write]``: prints the counts of the source and of one bucket.

``--write`` keeps those of one bucket in ``tests/house/counts.json``, which a test compares.
"""

from __future__ import annotations

import json
import sys

from tests.house.run import COUNTS, KEPT, one_bucket
from tests.house.source import counts, longest_chain


def main() -> None:
    for name, number in counts().items():
        print(f"{name:50} {number:6}")
    print(f"{'longest import chain in commhooks/hook':50} {longest_chain('commhooks/hook'):6}")
    rows = one_bucket()
    names = [name for name in next(iter(rows.values())) if name != "names"]
    print("\n" + " " * 20 + "".join(f"{name:>14}" for name in names))
    for case, row in rows.items():
        print(f"{case:20}" + "".join(f"{row.get(name, ''):14}" for name in names))
        if "-v" in sys.argv:
            print("\n".join(f"    {file}" for file in row["names"]))
    if "--write" in sys.argv:
        kept = {
            case: {name: row[name] for name in KEPT if name in row} for case, row in rows.items()
        }
        COUNTS.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()

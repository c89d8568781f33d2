"""What a planted bug is."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Mutant", "planted"]


class Mutant(NamedTuple):
    """One wrong change of the source.

    Attributes:
        name: what is wrong, in a few words.
        file: below the root of the project.
        old, new: text that occurs once, and what takes its place.
        test: the test that has to fail then; a file, and a function in it or one of its cases.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def planted_in(self, source: str) -> str:
        """The source with this bug."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"mutant {self.name!r}: its text occurs {count} times in {self.file}, not once; "
                f"the source has changed, write the mutant anew"
            )
        return source.replace(self.old, self.new)


def planted(file: str, *bugs: tuple[str, str, str, str]) -> list[Mutant]:
    """Several bugs of one file: name, old text, new text, test."""
    return [Mutant(name, file, old, new, test) for name, old, new, test in bugs]

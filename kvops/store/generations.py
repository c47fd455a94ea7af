"""The numbers that a master gives to puts, each above all that it or a master before it gave."""

from __future__ import annotations

from kvops.store.model import GENERATION_SEQUENCE_BITS, Generation


class Generations:
    """A sequence within a term; a new term begins it anew, above all earlier ones."""

    def __init__(self, term: int) -> None:
        self.term = term
        self._sequence = 0

    def next(self) -> Generation:
        """One that nobody has."""
        self._sequence += 1
        return Generation(self.term << GENERATION_SEQUENCE_BITS | self._sequence)

    def ceiling(self) -> Generation:
        """No put from this generation on has been granted."""
        return Generation(self.term << GENERATION_SEQUENCE_BITS | self._sequence + 1)

    def begin(self, term: int) -> None:
        """A term that is durable, and that no master has used."""
        self.term, self._sequence = term, 0

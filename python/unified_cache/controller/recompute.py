"""When moving tokens costs more than computing them."""

from __future__ import annotations

__all__ = ["LoadOrRecompute", "StraightLine"]

# What was measured before counts for less with every new measurement: about the last hundred matter.
_MEMORY = 0.99
# So many measurements of each kind before they are believed.
_ENOUGH = 4
# What a learnt threshold refuses is loaded once in so many times all the same: else nothing would be
# measured any more where loading did not pay once.
_TRY_AGAIN = 64

# A threshold that nothing reaches.
_NEVER = 2**62


class StraightLine:
    """seconds = overhead + amount x rate, fitted to what was measured, the latest counting most.

    Least squares with weights that fade by `_MEMORY`; neither term below 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One measurement."""
        self.count += 1
        self._weight = self._weight * _MEMORY + 1
        self._x = self._x * _MEMORY + amount
        self._y = self._y * _MEMORY + seconds
        self._xx = self._xx * _MEMORY + amount * amount
        self._xy = self._xy * _MEMORY + amount * seconds

    def terms(self) -> tuple[float, float]:
        """(overhead in seconds, seconds for each unit)."""
        if self._x <= 0:
            return (0.0, 0.0)
        spread = self._weight * self._xx - self._x * self._x
        # Amounts that hardly differ say nothing about the overhead.
        if spread > 1e-6 * self._x * self._x:
            rate = (self._weight * self._xy - self._x * self._y) / spread
            overhead = (self._y - rate * self._x) / self._weight
            if rate >= 0 and overhead >= 0:
                return overhead, rate
            if rate < 0:
                return self._y / self._weight, 0.0
        return 0.0, self._y / self._x


class LoadOrRecompute:
    """Thresholds in tokens, below which a hit is computed again: fixed, or learnt from what is measured.

    Bringing n tokens to device costs ``overhead + n x seconds a token`` of the copy; computing them with the
    rest of the prompt costs ``n x seconds a token`` of prefill. They are equal at the threshold.

    Args:
        page_size: tokens a page.
        host: the setting `load_back_threshold`, tokens or "auto".
        storage: the setting `prefetch_threshold`, likewise.
        host_default: used until enough was measured.
        storage_default: likewise.
    """

    def __init__(
        self,
        page_size: int,
        host: int | str,
        storage: int | str,
        *,
        host_default: int = 10,
        storage_default: int = 256,
    ) -> None:
        self._page_size = page_size
        self._host = host
        self._storage = storage
        self._host_default = host_default
        self._storage_default = storage_default
        self._loads = StraightLine()
        self._reads = StraightLine()
        self._prefills = StraightLine()
        self._refused = 0
        self.reported = False  # the engine measures its prefills itself
        # With other ranks, which measure other times: what they agree on, for host and storage.
        self.agreed: tuple[int, int] | None = None

    # What was measured

    def loaded(self, pages: int, seconds: float) -> None:
        """A copy from host to device took so long."""
        if pages > 0 and seconds > 0:
            self._loads.add(pages * self._page_size, seconds)

    def read(self, pages: int, seconds: float) -> None:
        """Reading pages from storage to host took so long, with its look-up."""
        if pages > 0 and seconds > 0:
            self._reads.add(pages * self._page_size, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Computing so many tokens of a prompt took so long."""
        if tokens > 0 and seconds > 0:
            self._prefills.add(tokens, seconds)

    # What follows

    @property
    def load_back_threshold(self) -> int:
        """Host hits shorter than this, in tokens, are computed again."""
        return self.measured[0] if self.agreed is None else self.agreed[0]

    @property
    def prefetch_threshold(self) -> int:
        """Storage hits shorter than this, in tokens, are computed again."""
        return self.measured[1] if self.agreed is None else self.agreed[1]

    @property
    def measured(self) -> tuple[int, int]:
        """Both thresholds, as this rank alone would have them."""
        host = self._host
        if not isinstance(host, int):
            host = self._learnt(self._host_default, self._loads)
        storage = self._storage
        if not isinstance(storage, int):
            # From storage they come to host first, and then to device.
            storage = self._learnt(self._storage_default, self._reads, self._loads)
        return host, storage

    def worth_loading(self, tokens: int) -> bool:
        """A host hit of so many tokens is loaded, and not computed again."""
        return self._worth(tokens, self.load_back_threshold, learnt=not isinstance(self._host, int))

    def worth_reading(self, tokens: int) -> bool:
        """A storage hit of so many tokens is read, and not computed again."""
        return self._worth(tokens, self.prefetch_threshold, learnt=not isinstance(self._storage, int))

    def _worth(self, tokens: int, threshold: int, *, learnt: bool) -> bool:
        if tokens >= threshold or not learnt:
            return tokens >= threshold
        self._refused += 1
        return self._refused % _TRY_AGAIN == 0

    def _learnt(self, default: int, *moves: StraightLine) -> int:
        if self._prefills.count < _ENOUGH or any(move.count < _ENOUGH for move in moves):
            return default
        _, computing = self._prefills.terms()
        terms = [move.terms() for move in moves]
        gain = computing - sum(rate for _, rate in terms)
        if gain <= 0:
            return _NEVER
        return min(int(sum(overhead for overhead, _ in terms) / gain) + 1, _NEVER)

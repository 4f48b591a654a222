"""How sure a peak of memory is: what the neighbours of a lookup disagree about, and operations that nobody measured."""

from pathlib import Path
from typing import NamedTuple

from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.need import Need
from hotloop.apps.simulate.simulation_record import Peak, PeakInterval
from hotloop.printing.text import size

# Shares by which a figure may be off where nothing is in doubt. What is allocated was never off by more than 0.4% then.
# It gets more, because others have seen trainings that were off by more than anything here explains: predictions.md.
SURE = 0.03
CACHED = 0.03  # of what is reserved, which turns on the order of single workspaces
_TOLD = 3  # doubts that are told
_MATTERS = SURE  # share of the peak from which on a doubt is told


class _Doubt(NamedTuple):
    """Memory that may be more or less than what was taken for it."""

    reach: int  # the most that there may be together with it
    seen: int  # what there was
    under: int  # bytes by which it may be less
    low: int
    high: int
    module: str

    def widens(self, peak: int) -> int:
        """Bytes by which it lifts or lowers a peak."""
        return max(self.reach - peak, self.under if self.seen > (1 - _MATTERS) * peak else 0)


class Spread:
    """The least and the most that may be allocated at the peak, and the doubts behind it.

    A doubt counts while its memory is held: one that is large, but far from the peak, widens nothing.
    """

    def __init__(self) -> None:
        self.low = self.high = 0
        self._under = self._over = 0  # bytes of what is held now
        self._most_under = self._most_over = 0  # at any moment
        self._doubts: dict[tuple[str, str, str], _Doubt] = {}  # by what, where and why; of each that which reaches most

    def hold(self, need: Need, operation: Operation | None, allocated: int) -> None:
        """Memory in doubt is about to be taken beside what is allocated."""
        self._under += need.under
        self._over += need.over
        self._most_under, self._most_over = max(self._most_under, self._under), max(self._most_over, self._over)
        high = need.bytes + need.over
        module = operation.module if operation else ""
        doubt = _Doubt(allocated + high, allocated + need.bytes, need.under, need.bytes - need.under, high, module)
        key = need.what, _place(operation), need.doubt
        self._doubts[key] = max(doubt, self._doubts.get(key, doubt))

    def release(self, need: Need) -> None:
        self._under -= need.under
        self._over -= need.over

    def saw(self, allocated: int) -> None:
        """So much is allocated now, what is in doubt included."""
        self.low = max(self.low, allocated - self._under)
        self.high = max(self.high, allocated + self._over)

    def interval(self, peak: Peak) -> PeakInterval:
        """Between which nine of ten such peaks lie.

        The allocator keeps what it reserved: so a doubt counts there, whenever it was held.
        """
        low, high = int((1 - SURE) * self.low), int((1 + SURE) * self.high)
        least = max(low, int((1 - CACHED) * peak.reserved) - self._most_under)
        most = max(high, int((1 + CACHED) * peak.reserved) + self._most_over)
        context = peak.process - peak.reserved
        return PeakInterval(
            Peak(low, least, least + context), Peak(high, most, most + context), self._reasons(peak.allocated)
        )

    def _reasons(self, peak: int) -> tuple[str, ...]:
        """What makes it wide, in sentences, the widest first."""
        wide = [(doubt.widens(peak), key) for key, doubt in self._doubts.items()]
        told = sorted((each for each in wide if each[0] > _MATTERS * peak), reverse=True)[:_TOLD]
        return tuple(_sentence(self._doubts[key], *key) for _, key in told)


def _sentence(doubt: _Doubt, what: str, where: str, why: str) -> str:
    module = f" ({doubt.module})" if doubt.module else ""
    return f"{what}{where}{module}: between {size(doubt.low)} and {size(doubt.high)}; {why}"


def _place(operation: Operation | None) -> str:
    place = operation.place if operation else None
    return f" at {Path(place.file).name}:{place.line}" if place else ""


def verdict(interval: PeakInterval, limit: int, fragmented: float) -> bool | None:
    """Whether it fits into so many bytes, a share of which may be fragmented; None: it is too close to say."""
    if interval.high.allocated <= (1 - fragmented) * limit:
        return True
    return False if interval.low.allocated > limit else None


def too_close(interval: PeakInterval, limit: int) -> str:
    """Why there is no verdict, in a sentence."""
    low, high = size(interval.low.allocated), size(interval.high.allocated)
    return f"too close to say whether it fits: {low} to {high} of {size(limit)} are allocated"

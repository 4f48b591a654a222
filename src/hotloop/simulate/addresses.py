"""Where CUDA's driver puts segments, as it was seen to: between free blocks of one size, their addresses decide."""

GRAIN = 2 * 2**20  # of a segment
RANGE = 32 * 2**20  # of addresses that the driver takes at once
FIRST_RANGE = 414 * 2**20  # of addresses that it holds at the top until the first kernel is loaded
TOP = 0x7F00_0000_0000


class Addresses:
    """Addresses go down, range by range; what a range has left is filled first."""

    def __init__(self) -> None:
        self._end = TOP - FIRST_RANGE
        self._gaps: list[tuple[int, int]] = []  # addresses and sizes that ranges have left

    def place(self, size: int) -> int:
        """Where the next segment goes."""
        need = -(-size // GRAIN) * GRAIN
        gap = next((gap for gap in reversed(self._gaps) if gap[1] >= need), None)
        if gap is None:
            length = -(-need // RANGE) * RANGE
            self._end -= length
            gap = self._end, length
        else:
            self._gaps.remove(gap)
        if gap[1] > need:
            self._gaps.append((gap[0] + need, gap[1] - need))
        return gap[0]

    def kernels_loaded(self) -> None:
        """The first kernel has run: what the driver held at the top until then can have segments."""
        self._gaps.append((TOP - FIRST_RANGE, FIRST_RANGE))

"""Rules about a GPU that is not well: it fails, its memory errs, or it is slowed down."""

from collections.abc import Iterator

from hotloop.apps.top.advice.recent import Lasting, Recent
from hotloop.apps.top.advice.rule import Advice, Moment
from hotloop.monitor.reading import Gpu
from hotloop.printing.text import plural, printable

SLOWED_FOR = 20.0  # seconds for which a GPU must be held back
SLOWED_LAPSE = 5.0  # seconds: near a limit the reason comes and goes several times a second
CAPPED_BELOW = 85.0  # percent of the clocks: a GPU at its power limit is in order as long as it is nearly as fast
CAPPED_UNTIL = 90.0

POWER, HEAT, HARDWARE = "power-cap", "heat", "hardware-slowdown"
KINDS = {"power cap": POWER, "heat": HEAT, "hardware slowdown": HARDWARE, "power brake": HARDWARE}


class FailedGpu:
    """A GPU that does not answer: said at once, for nothing can be done with it."""

    def see(self, moment: Moment) -> Iterator[Advice]:
        for gpu in moment.reading.gpus:
            if gpu.error is not None:
                yield Advice(
                    "failed",
                    gpu.index,
                    f"GPU {gpu.index} does not answer: {printable(gpu.error)}",
                    fix="see what the driver says (`sudo dmesg | grep -i xid`); then reset the GPU or restart",
                )


class MemoryErrors:
    """Errors in the memory of a GPU that could not be corrected: said at once, and until the driver forgets them."""

    def see(self, moment: Moment) -> Iterator[Advice]:
        for gpu in moment.reading.gpus:
            if gpu.ecc_uncorrected:
                errors = plural(gpu.ecc_uncorrected, "error")
                yield Advice(
                    "memory-errors",
                    gpu.index,
                    f"the memory of GPU {gpu.index} has had {errors} that could not be corrected: results may be wrong",
                    fix="go on from a checkpoint of before; reset the GPU or restart; where it comes again, replace it",
                )


class Slowed:
    """A GPU that was held back for 20 s by heat or by its hardware, or by its power limit to below 85% of its clocks.

    A reason that comes and goes within 5 s counts as one that stays. Power-capped ends above 90% of the clocks.
    """

    def __init__(self) -> None:
        self._lasting: Lasting[tuple[int, str]] = Lasting(SLOWED_FOR, SLOWED_LAPSE)

    def see(self, moment: Moment) -> Iterator[Advice]:
        gpus = {gpu.index: gpu for gpu in moment.reading.gpus}
        shares = {index: _share_of_clocks(gpu, moment.recent) for index, gpu in gpus.items()}
        slowed = [(index, kind) for index, gpu in gpus.items() for kind in _kinds(gpu.throttled or ())]
        slowed = [key for key in slowed if key[1] != POWER or self._too_slow(key, shares[key[0]])]
        for index, kind in sorted(self._lasting.see(slowed, moment.now)):
            if index in gpus:
                yield _slowed(gpus[index], kind, shares[index])

    def _too_slow(self, key: tuple[int, str], share: float | None) -> bool:
        return share is not None and share < (CAPPED_UNTIL if self._lasting.said(key) else CAPPED_BELOW)


def _kinds(reasons: tuple[str, ...]) -> set[str]:
    """What to say of the reasons of a sample; clocks that somebody has set are not among it."""
    kinds = {KINDS[reason] for reason in reasons if reason in KINDS}
    # Heat makes the hardware slow down; its bit is set as well then.
    return kinds - {HARDWARE} if HEAT in kinds and "power brake" not in reasons else kinds


def _share_of_clocks(gpu: Gpu, recent: Recent) -> float | None:
    """Percent of the highest clocks that a GPU runs at, of late where that is known, else now."""
    clock = recent.mean(gpu.index, "clock", SLOWED_FOR)
    clock = gpu.clock if clock is None else clock
    return None if clock is None or not gpu.clock_most else 100 * clock / gpu.clock_most


_SLOWED = {
    POWER: (
        "is power-capped",
        "where supply and cooling allow it, raise the limit: `sudo nvidia-smi -i {gpu} -pl WATTS`; plug a laptop in",
    ),
    HEAT: (
        "is slowed down by heat",
        "give it air: free its fans and vents, see to the cooling of the room; or lower its power limit",
    ),
    HARDWARE: (
        "is slowed down by its hardware",
        "check its power cables and supply, then its cooling; `nvidia-smi -q -i {gpu} -d PERFORMANCE` tells more",
    ),
}


def _slowed(gpu: Gpu, kind: str, share: float | None) -> Advice:
    what, fix = _SLOWED[kind]
    clocks = "" if share is None else f": clocks at {share:.0f}%"
    heat = f" ({gpu.temperature:.0f} °C)" if kind == HEAT and gpu.temperature is not None else ""
    return Advice(kind, gpu.index, f"GPU {gpu.index} {what}{heat}{clocks}", fix=fix.format(gpu=gpu.index))

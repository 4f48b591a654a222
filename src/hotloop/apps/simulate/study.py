"""Questions about one script on GPUs that are not here: what it would do on each, and its largest batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hotloop.apps.simulate.batch_setting import HOW, BatchSetting
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.largest_batch import Outcome, SearchResult, SearchStopped, largest
from hotloop.apps.simulate.running import Simulator
from hotloop.apps.simulate.shim import CannotSimulate
from hotloop.apps.simulate.simulation_record import Batch, Simulation
from hotloop.errors import BadArgument
from hotloop.printing.text import printable, size

STEPS = 2  # of a run of a search: the optimizer's state is there from the second on
MOST = 2**16  # the largest batch that is tried, where the script's own is not large
NUMBER = 4  # bytes
FRAGMENTED = 0.04  # share of the memory by which the simulated allocator may run out too early


class Study:
    """A script, its arguments, and how long to run it; `told` hears of each run of a search, in words."""

    def __init__(
        self,
        simulator: Simulator,
        script: Path | str,
        arguments: Sequence[str],
        *,
        steps: int = 3,
        time_limit: float = 120.0,
        batch: BatchSetting | None = None,
        told: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._batch = batch
        self._steps, self._told = steps, told
        self._run = partial(simulator.run, script, arguments, time_limit=time_limit)

    def plain(self, card: Card, *, silent: bool = False) -> Simulation:
        """The script as it is, with the batch that was asked for."""
        run = partial(self._run, steps=self._steps, batch=self._batch)
        found = run(card, silent=silent)
        return _if_close(found, card, partial(run, silent=True))

    def with_largest(self, plain: Simulation, card: Card) -> Simulation:
        """The same with the largest batch that fits on the card, as far as it was found, beginning with that set."""
        found = self._search(card, plain)
        ended = (f"the search for the largest batch ended: {found.ended}",) if found.ended else ()
        return replace(plain, largest_batch=found.batch, search=found, notes=(*plain.notes, *ended))

    def _search(self, card: Card, own: Simulation) -> SearchResult:
        """The largest batch, from what was seen of the script's own."""
        batch = _batch(own)
        start = min(size for size in (batch.size, batch.samples, MOST) if size)  # data may have less than a batch
        reference, known = (start, batch.work), {start: own}

        def run(tried: int) -> Outcome:
            if tried not in known:
                known[tried] = self._tried(card, tried)
            return _outcome(known[tried], tried, card, reference)

        return largest(run, start, most=max(MOST, 16 * start))

    def _tried(self, card: Card, batch: int) -> Simulation:
        setting = self._batch and replace(self._batch, size=batch)
        run = partial(self._run, steps=STEPS, timed=False, silent=True)
        try:
            seen = run(card, batch=setting)
        except CannotSimulate as error:
            raise SearchStopped(f"with a batch of {batch:,} {error.what}") from error
        peak = "does not fit" if _short(seen) else f"{size(seen.peak.process)} at its peak" if seen.peak else "unknown"
        self._told(f"{card.key}, a batch of {batch:,}: {peak}")
        return seen


def batch_to_set(batch: int | None, batch_from: str | None, cards: Sequence[Card]) -> BatchSetting:
    """The batch that was asked for; refused where one number of each sample is more than the card has."""
    if batch is None or batch_from is None:
        raise BadArgument(
            "hotloop does not look for the batch of a script",
            fix=f"say how large it is and where the script takes it, as in {HOW}",
        )
    largest = max(cards, key=lambda card: card.memory)
    if batch * NUMBER > largest.memory:
        raise BadArgument(
            f"a batch of {batch:,} does not fit on {largest.name}: one number of each sample takes "
            f"{size(batch * NUMBER)}, and it has {size(largest.memory)}",
            fix="give a smaller --batch; --largest-batch finds the largest",
        )
    return BatchSetting.parsed(batch_from, batch)


def _if_close(short: Simulation, card: Card, run: Callable[[Card], Simulation]) -> Simulation:
    """What ran out of memory is run again with as much more as the prediction may be too high.

    Where that is enough, it is too close to say whether it fits.
    """
    if short.fits is not False or short.peak is None or short.interval is None:
        return short
    unsure = short.peak.allocated / max(1, short.interval.low.allocated) - 1
    try:
        found = run(replace(card, memory=int(card.memory * (1 + max(FRAGMENTED, unsure)))))
    except CannotSimulate:
        return short
    if _short(found) or not found.trained:
        return short
    findings = [
        replace(each, level="warning", confidence="suspected") if each.code == "out-of-memory" else each
        for each in short.findings
    ]
    return replace(found, gpu_memory=card.memory, fits=None, findings=(*findings,))


def _batch(seen: Simulation) -> Batch:
    return seen.batch or Batch(None, "")


def _short(seen: Simulation) -> bool:
    """Whether memory ran out, even if the script went on."""
    return seen.fits is False or any(finding.code == "out-of-memory" for finding in seen.findings)


def _outcome(seen: Simulation, batch: int, card: Card, reference: tuple[int, int]) -> Outcome:
    """What a run says to the search; one that says nothing about memory ends it."""
    if _short(seen):
        return Outcome(False, None, card.memory, _limited(seen))
    if not seen.trained:
        raise SearchStopped(f"with a batch of {batch:,} {_why(seen)}")
    own, work = reference
    if _batch(seen).work < work * (1 + (batch / own - 1) / 4):  # some work does not grow with the batch
        reached = max(1, own * _batch(seen).work // work)
        raise SearchStopped(f"a step never has more than about {reached:,} items, whatever the batch", reached)
    return Outcome(True, _in_use(seen), card.memory)


def _in_use(seen: Simulation) -> int:
    """Bytes by which the limit is guessed: between what is allocated and what is reserved, as memory runs out there.

    What is reserved counts too much: it stays the same once memory is full, and more fits all the same.
    """
    assert seen.peak is not None
    return seen.peak.process - (seen.peak.reserved - seen.peak.allocated) // 2


def _limited(seen: Simulation) -> str:
    """What filled the memory, and at which line it ran out."""
    most = sorted(seen.categories.items(), key=lambda pair: -pair[1])[:2]
    what = " and ".join(f"{name} ({size(amount)})" for name, amount in most)
    place = next((f" at {f.file}:{f.line}" for f in seen.findings if f.code == "out-of-memory"), "")
    return what + place


def _why(seen: Simulation) -> str:
    """How a script ended that has no verdict."""
    said = (finding.message for finding in seen.findings if finding.code == seen.status)
    return printable(next(said, "the script makes no step"))

"""Several questions about one script on GPUs that are not here: its largest batch, and what would make room."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hotloop.apps.simulate.batch_setting import HOW, BatchSetting
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.largest_batch import Outcome, SearchResult, SearchStopped, Variant, largest
from hotloop.apps.simulate.running import TIME, Simulator
from hotloop.apps.simulate.shim import CannotSimulate
from hotloop.apps.simulate.simulation_record import Batch, Simulation, StepPace
from hotloop.errors import BadArgument
from hotloop.printing.text import printable, size

MEMORY = ("hotloop.apps.simulate.memory:MemoryListener",)
EVERYTHING = (*MEMORY, TIME)
STEPS = 2  # of a run of a search: the optimizer's state is there from the second on
MOST = 2**16  # the largest batch that is tried, where the script's own is not large
HOST = 0.8  # share of the host's free memory that a run of a search may take
NUMBER = 4  # bytes
RUNS = 5  # of a search with a change: what it finds fits, if it is not the very largest
MICRO_BATCHES = (2, 4, 8)
ROOMY = 64  # times the memory of a card, to see what a script would take
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
        gpus: int = 1,
        told: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._batch = batch
        self._steps, self._told = steps, told
        self._run = partial(simulator.run, script, arguments, time_limit=time_limit, gpus=gpus)
        self._pace: StepPace | None = None  # of another card: one host for all
        self._like: list[tuple[int, int]] = []  # batches and peaks of another card

    def plain(self, card: Card, *, silent: bool = False) -> Simulation:
        """The script as it is, with the batch that was asked for."""
        limit = None if self._batch is None else _host_memory()
        run = partial(
            self._run, steps=self._steps, listeners=EVERYTHING, batch=self._batch,
            memory_limit=limit, like=self._pace,
        )  # fmt: skip
        found = run(card, silent=silent)
        self._pace = self._pace or found.pace
        return _if_close(found, card, partial(run, silent=True))

    def with_largest(self, plain: Simulation, card: Card) -> Simulation:
        """The same with the largest batch that fits on the card, as far as it was found, beginning with that set."""
        found = self._search(card, plain)
        self._like = self._like or [(tried, peak) for tried, _, peak in found.tried if peak is not None]
        ended = (f"the search for the largest batch ended: {found.ended}",) if found.ended else ()
        return replace(plain, largest_batch=found.batch, search=found, notes=(*plain.notes, *ended))

    def with_help(self, plain: Simulation, card: Card) -> Simulation:
        """The same with changes that may make room, each simulated."""
        as_it_is = self._with_needs(_variant("plain", "as it is", plain, plain.search), card, None)
        tried, notes = [], []
        for name, change in _changes(card):
            try:
                seen = self._changed(card, name, steps=STEPS, listeners=EVERYTHING, batch=self._batch)
                found = self._search(card, seen, plain.search, name) if seen and plain.search else None
            except SearchStopped as stop:
                notes.append(f"{change}: could not be tried: {stop.why}")
                continue
            if seen is not None:
                tried.append(self._with_needs(_variant(name, change, seen, found), card, name))
        tried += self._accumulated(plain, card)
        return replace(plain, helps=(as_it_is, *tried), notes=(*plain.notes, *notes))

    def with_room(self, card: Card) -> Simulation:
        """The script as it is on such a card with far more memory, for what runs out on one and not on several."""
        large = replace(card, memory=ROOMY * card.memory)
        return self._run(
            large, steps=self._steps, listeners=EVERYTHING, batch=self._batch, silent=True, like=self._pace
        )

    def _with_needs(self, variant: Variant, card: Card, change: str | None) -> Variant:
        """What does not fit, with what it would take on a card that is large enough."""
        if variant.peak is not None:
            return variant
        large = replace(card, memory=ROOMY * card.memory)
        try:
            seen = self._run(large, variant=change, steps=STEPS, listeners=MEMORY, batch=self._batch, silent=True)
        except CannotSimulate:
            return variant
        return variant if seen.peak is None or _short(seen) else replace(variant, needs=seen.peak.process)

    def _search(
        self, card: Card, own: Simulation, before: SearchResult | None = None, change: str | None = None
    ) -> SearchResult:
        """The largest batch, from what was seen of the script's own; with a change, few runs from what fits before."""
        batch = _batch(own)
        start = min(size for size in (batch.size, batch.samples, MOST) if size)  # data may have less than a batch
        reference, known = (start, batch.work), {start: own}

        def run(tried: int) -> Outcome:
            if tried not in known:
                known[tried] = self._tried(card, change, tried, _host_memory())
            return _outcome(known[tried], tried, card, reference)

        most = max(MOST, 16 * start)
        if before is None:
            return largest(run, start, most=most, like=self._like)
        seen = [] if _short(own) else [(start, _in_use(own))]
        return largest(run, before.batch or start, most=most, like=seen, runs=RUNS)

    def _tried(self, card: Card, change: str | None, batch: int, limit: int) -> Simulation:
        run = partial(self._run, card, variant=change, steps=STEPS, listeners=MEMORY, silent=True)
        try:
            seen = run(batch=self._batch and replace(self._batch, size=batch), memory_limit=limit)
        except CannotSimulate as error:
            raise SearchStopped(f"with a batch of {batch:,} {error.what}") from error
        self._told(f"{card.key}, {change or 'as it is'}, a batch of {batch:,}: {_verdict(seen)}")
        return seen

    def _changed(self, card: Card, change: str, **options: Any) -> Simulation | None:
        """A run with a change; None where there was nothing to change."""
        try:
            seen = self._run(card, variant=change, silent=True, **options)
        except CannotSimulate as error:
            raise SearchStopped(error.what) from error
        if not seen.trained:
            raise SearchStopped(_why(seen))
        if seen.variant is None and not _short(seen):
            return None
        self._told(f"{card.key}, {change}, a batch of {_batch(seen).size or 'its own'}: {_verdict(seen)}")
        return seen

    def _accumulated(self, plain: Simulation, card: Card) -> list[Variant]:
        """The batch in two micro-batches, or in more where it does not fit.

        Only two of them are run: from the second on each finds the memory as the one before it did.
        """
        for count in MICRO_BATCHES:
            if self._batch is None or self._batch.size < count:
                return []
            each = -(-self._batch.size // count)
            micro_batch = replace(self._batch, size=each)
            try:
                seen = self._changed(card, "accumulation:2", steps=STEPS, listeners=MEMORY, batch=micro_batch)
            except SearchStopped:
                return []
            if seen is not None and not _short(seen):
                return [_variant("accumulation", f"accumulate over {count} batches of {each:,}", seen, None)]
        return []


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


def _host_memory() -> int:
    """Bytes that a run with another batch than the script's own may take here."""
    return int(HOST * psutil.virtual_memory().available)


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


def _changes(card: Card) -> list[tuple[str, str]]:
    """Changes that any training can make, and what to write for them."""
    half = (
        ("bf16", "autocast to bf16") if card.capability >= (8, 0) else ("fp16", "autocast to fp16, with a GradScaler")
    )
    return [half, ("checkpointing", "checkpoint the repeated blocks")]


def _variant(name: str, change: str, seen: Simulation, found: SearchResult | None) -> Variant:
    fits = seen.peak is not None and not _short(seen)
    peak = seen.peak.process if fits and seen.peak is not None else None
    time = seen.step_ms.median if fits and seen.step_ms is not None else None
    return Variant(name, change, peak, found.batch if found else None, time)


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


def _verdict(seen: Simulation) -> str:
    if _short(seen):
        return "does not fit"
    return f"{size(seen.peak.process)} at its peak" if seen.peak is not None else "unknown"


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

"""One epoch of training, as `fit` has it: step by step, or many steps of data that lives on the device at once."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from hotloop.data.origin import nothing_came
from hotloop.loop.burst import stretches

if TYPE_CHECKING:
    from hotloop.loop.loop import Loop

Transform = Callable[[Any], Any]


def epoch_of(
    loop: "Loop", loader: Iterable[Any], device_transform: Transform | None = None
) -> Iterator[tuple[int, int]]:
    """One epoch of training; after each stretch of it, the batches and the items that it held."""
    stream = loop._stream = loop._stream_of(loader)
    if stream.resident is None:
        for batch in loop.batches(loader, device_transform=device_transform):
            loop.step(batch)
            yield 1, loop._step.update.weighing.items_in(batch)
        return
    loop._begin_epoch(loader)
    resident = stream.resident
    draws = stretches(resident.draws(), lambda: loop._bursts.size(loop._step, resident))
    for number, drawn in ((stream.first + number, drawn) for number, drawn in draws):
        if loop._tuner.is_busy and len(drawn) > 1:
            loop._before_step(loader, device_transform, None)
        burst = loop._bursts.of(loop._step, resident, drawn, device_transform)
        origins = [resident.origin(number + i, each) for i, each in enumerate(drawn)]
        if burst is not None:
            losses = burst.run(drawn, partial(_after_updates, loop))
            loop._watch.see_burst(burst.names, (losses,), burst.batch, origins)
            yield len(drawn), len(drawn) * burst.batch
            continue
        for stream.origin, each in zip(origins, drawn, strict=True):
            batch = resident.gather(resident.items(), each)
            if device_transform is not None:
                batch = loop._transformed(device_transform, batch)
            if loop._tuner.is_busy:
                loop._before_step(loader, device_transform, batch)
            loop._given = batch
            loop.step(batch)
            yield 1, loop._step.update.weighing.items_in(batch)
    if not loop._watch.items_seen:
        raise nothing_came(loader)
    loop._end_epoch()


def _after_updates(loop: "Loop") -> None:
    for turn in loop._turns:
        loop._schedule.after_update(turn)

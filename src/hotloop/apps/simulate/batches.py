"""The batch of a script that runs on the simulated device: found by itself, and set without changing the script."""

import argparse
import importlib
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from hotloop.apps.simulate._torch import fetchers
from hotloop.apps.simulate.events import Listener, Operation
from hotloop.apps.simulate.places import here
from hotloop.apps.simulate.replaced import Patches
from hotloop.apps.simulate.simulation_record import Batch
from hotloop.apps.simulate.ways import ScriptText, Way, batch_variables, look, rank, rewritten, value_of

TRUST = ("argument", "environment", "variable", "loader")
PATIENCE = 64  # batches without a step after which an epoch may end
CASTS = ("aten._to_copy.default", "aten.copy_.default")  # autocast makes as many numbers of weights whatever the batch


class Batches(Listener):
    """Looks where a script has its batch, and sets it where `size` is asked for.

    An option of the command line is trusted most, then what the script reads from its environment, then a variable
    that is given a number; a `DataLoader` that is learnt from and has batches of another size than a variable says is
    set itself. `way` points at one of them, and then no other is looked at. It listens to count what a step does.
    """

    def __init__(self, source: str, size: int | None = None, way: str | None = None) -> None:
        self.source = source  # of the script, with the batch in it where a variable says it
        self.size = size
        self.way = Way.parsed(way) if way else None
        self.found: dict[str, int | None] = {}  # place → the script's own batch there
        self.set: list[str] = []  # places at which it was set
        self.clashes: dict[str, str] = {}  # kind of place → what disagrees there
        self.seen: ScriptText = look(source)
        self.made = self.work = 0  # numbers that the forward pass made: in this step so far, and in the last
        self._loaders = Loaders(self)
        self._options = Options(self)
        self._patches = Patches()

    def __enter__(self) -> Self:
        self._environment()
        self._variables()
        self._options.install(self._patches)
        self._loaders.install(self._patches)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.restore()

    def to_batch(self) -> Batch:
        """What is known of the batch at the end of a run."""
        places = self.set if self.size is not None else list(self.found)
        clear = [place for place in places if _kind(place) not in self.clashes]
        source = min(clear, key=lambda place: TRUST.index(_kind(place)), default="")
        size = self.found.get(source) if self.size is None else self.size if source else None
        return Batch(
            size=size,
            source=source,
            samples=self._loaders.samples or (size if self.work else None),
            places=tuple(place if own is None else f"{place} ({own})" for place, own in self.found.items()),
            clash="" if source else "; ".join(self.clashes.values()),
            items=self._loaders.items if self.size is not None else None,
            work=self.work,
        )

    def looks(self, kind: str, *names: str) -> bool:
        """Whether the batch is looked for there: anywhere, or where it was pointed at."""
        return self.way is None or (self.way.kind == kind and (not self.way.name or self.way.name in names))

    def notice(self, place: str, own: Any) -> bool:
        """Remember a place and the batch there; whether it is to be set."""
        with suppress(TypeError, ValueError):
            own = int(own)
        self.found[place] = own if isinstance(own, int) else None
        if self.size is not None and place not in self.set:
            self.set.append(place)
        return self.size is not None

    def disagree(self, kind: str, owns: dict[str, Any]) -> None:
        """Several places of one kind hold different batches, and nothing says which is meant."""
        self.found |= {place: own if isinstance(own, int) else None for place, own in owns.items()}
        names = " and ".join(place.partition(":")[2] for place in owns)
        called = f"the loaders of lines {names}" if kind == "loader" else names
        self.clashes[kind] = f"{called} disagree" if len(owns) > 1 else f"{called} is given several values"

    def _environment(self) -> None:
        pointed = self.way.name if self.way is not None and self.way.kind == "environment" else ""
        for name in (pointed,) if pointed else self.seen.environment:
            own = os.environ.get(name, self.seen.environment.get(name))
            if self.looks("environment", name) and self.notice(f"environment:{name}", own):
                os.environ[name] = str(self.size)

    def _variables(self) -> None:
        pointed = self.way is not None and self.way.kind == "variable"
        if pointed and self.way is not None and self.way.name:
            names = [self.way.name] if self.way.name in self.seen.variables else []
        elif not self.looks("variable") or (not pointed and (self.seen.options or self.seen.environment)):
            return  # where there is an option, variables only hold what it says
        else:
            names = batch_variables(self.seen)
        owns = {f"variable:{name}": value_of(self.seen, name) for name in names}
        if not pointed and (None in owns.values() or len(set(owns.values())) > 1):
            self.disagree("variable", owns)
            return
        for name in names:
            if self.notice(f"variable:{name}", owns[f"variable:{name}"]) and self.size is not None:
                self.source = rewritten(self.source, self.seen.variables[name], self.size)
                self.seen = look(self.source)  # lines have become longer or shorter

    # What the engine tells

    def after(self, operation: Operation) -> None:
        if operation.phase == "forward" and operation.name not in CASTS:
            self.made += sum(shape.numel for shape in operation.outputs)

    def step(self) -> None:
        self.work, self.made = self.made, 0
        self._loaders.stepped()


class Options:
    """Sees what argparse, click and typer read."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def install(self, patches: Patches) -> None:
        parse = argparse.ArgumentParser.parse_known_args

        def parsed(parser: Any, args: Any = None, namespace: Any = None) -> Any:
            found, rest = parse(parser, args, namespace)
            self._parsed(parser, found)
            return found, rest

        patches.set(argparse.ArgumentParser, "parse_known_args", parsed)
        for package in self._batches.seen.parsers:
            for module in ("click.core", f"{package}._click.core"):  # typer has one of its own
                with suppress(ImportError):
                    self._click(importlib.import_module(module).Parameter, patches)

    def _parsed(self, parser: argparse.ArgumentParser, found: argparse.Namespace) -> None:
        likely: dict[int, dict[str, argparse.Action]] = {}
        for action in parser._actions:
            sure = self._rank([*action.option_strings, action.dest], action.help)
            if sure is not None and hasattr(found, action.dest):
                likely.setdefault(sure, {})[action.dest] = action
        if not likely:
            return
        best = likely[min(likely)]
        names = {dest: max(action.option_strings, key=len, default=dest) for dest, action in best.items()}
        owns = {f"argument:{name}": getattr(found, dest) for dest, name in names.items()}
        if len({str(own) for own in owns.values()}) > 1:
            self._batches.disagree("argument", owns)
            return
        for dest, (place, own) in zip(best, owns.items(), strict=True):
            if self._batches.notice(place, own[0] if isinstance(own, list) and own else own):
                setattr(found, dest, _like(own, self._batches.size))

    def _click(self, parameter: Any, patches: Patches) -> None:
        consume = parameter.consume_value

        def consumed(option: Any, context: Any, given: Any) -> Any:
            value, source = consume(option, context, given)
            if self._rank([*option.opts, option.name or ""], getattr(option, "help", None)) is None:
                return value, source
            set_now = self._batches.notice(f"argument:{max(option.opts, key=len)}", value)
            return (str(self._batches.size) if set_now else value), source

        patches.set(parameter, "consume_value", consumed)

    def _rank(self, names: list[str], about: str | None) -> int | None:
        """How surely an option is the batch; None where it is not, or another was pointed at."""
        if not self._batches.looks("argument", *names):
            return None
        if self._batches.way is not None and self._batches.way.name:
            return 0
        ranks = [found for name in names if (found := rank(name)) is not None]
        if not ranks and "-b" in names and "batch" in (about or "").lower():
            return 0
        return min(ranks, default=None)


def _like(own: Any, size: int | None) -> Any:
    """The batch in the type that the script's own is of."""
    if isinstance(own, list):
        return [size]
    return str(size) if isinstance(own, str) else size


class Loaders:
    """Loaders that are read where gradients are on; those of an evaluation stay as they are."""

    def __init__(self, batches: Batches) -> None:
        self.samples = 0  # that the last step learnt from
        self.items: int | None = None  # of data that has less than a batch, and was gone through again for it
        self._batches = batches
        self._counted = self._drawn = 0  # samples and batches since the last step
        self._full: weakref.WeakSet[Any] = weakref.WeakSet()  # samplers that are to give full batches
        self._lines: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # where loaders were made

    def install(self, patches: Patches) -> None:
        make, begin, draw = DataLoader.__init__, DataLoader.__iter__, BatchSampler.__iter__

        def made(loader: Any, *args: Any, **kwargs: Any) -> None:
            place = here()
            self._lines[loader] = place.line if place else 0
            make(loader, *args, **kwargs)

        def began(loader: Any) -> Any:
            if torch.is_grad_enabled():
                self._learns_from(loader)
            return begin(loader)

        def drawn(sampler: Any) -> Iterator[list[int]]:
            return self._full_batches(sampler) if sampler in self._full else draw(sampler)

        patches.set(DataLoader, "__init__", made)
        patches.set(DataLoader, "__iter__", began)
        patches.set(BatchSampler, "__iter__", drawn)
        for fetcher, count in zip(fetchers(), (_length, _leading), strict=False):
            patches.set(fetcher, "fetch", self._counting(fetcher.fetch, count))

    def stepped(self) -> None:
        self.samples = self._counted
        self._counted = self._drawn = 0

    def _learns_from(self, loader: Any) -> None:
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if not isinstance(sampler, BatchSampler) or sampler in self._full:
            return
        line = self._lines.get(loader, 0)
        if self._batches.looks("loader", str(line)) and not self._said(sampler.batch_size):
            self._found(loader, sampler, line)
        if self._batches.size is not None and type(sampler).__iter__ is BatchSampler.__iter__:
            self._full.add(sampler)

    def _said(self, size: int) -> bool:
        """Whether the batch was set elsewhere, and this is what came of it."""
        batches = self._batches
        options = any(place.startswith(("argument:", "environment:")) for place in batches.set)
        return batches.way is None and (options or (size == batches.size and bool(batches.set)))

    def _found(self, loader: Any, sampler: BatchSampler, line: int) -> None:
        own, place = sampler.batch_size, f"loader:{line}"
        others = {other: size for other, size in self._batches.found.items() if other.startswith("loader:")}
        if any(size != own for size in others.values()) and place not in others:
            self._batches.disagree("loader", {**others, place: own})
        elif self._batches.notice(place, others.get(place, own)) and self._batches.size is not None:
            sampler.batch_size = self._batches.size
            loader.__dict__["batch_size"] = self._batches.size  # which cannot be set as attributes are
            self._batches.set[:] = [other for other in self._batches.set if other.startswith("loader:")]

    def _full_batches(self, sampler: Any) -> Iterator[list[int]]:
        """Full ones as long as they are learnt from, since memory is that of a full batch.

        Data that has less than a batch is gone through again, and an epoch goes on. Where nothing learns from it, it
        ends as it would.
        """
        items, first = iter(sampler.sampler), True
        while True:
            batch = list(islice(items, sampler.batch_size))
            missing = sampler.batch_size - len(batch)
            if missing and first:
                self.items = len(batch)
            if missing and (first or self._learning):
                items = _again(sampler.sampler)
                batch += islice(items, missing)
            if len(batch) < (sampler.batch_size if sampler.drop_last else 1):
                return
            first = False
            yield batch

    @property
    def _learning(self) -> bool:
        return self._drawn <= PATIENCE and bool(self._batches.work or self._batches.made)

    def _counting(self, get: Callable[..., Any], count: Callable[[Any, Any], int]) -> Callable[..., Any]:
        def counted(fetcher: Any, index: Any) -> Any:
            data = get(fetcher, index)
            if torch.is_grad_enabled():
                self._drawn += 1
                self._counted += count(index, data)
            return data

        return counted


def _again(sampler: Any) -> Iterator[int]:
    """What a sampler gives, over and over; nothing where it gives nothing."""
    while True:
        some = False
        for item in sampler:
            some = True
            yield item
        if not some:
            return


def _length(index: Any, _data: Any) -> int:
    return len(index) if isinstance(index, list | tuple) else 1


def _leading(_index: Any, data: Any) -> int:
    """The first dimension of the first tensor of a batch."""
    if isinstance(data, Tensor):
        return len(data) if data.dim() else 1
    values = data.values() if hasattr(data, "values") else data if isinstance(data, list | tuple) else ()
    return next((found for value in values if (found := _leading(None, value))), 0)


def _kind(place: str) -> str:
    return place.partition(":")[0]

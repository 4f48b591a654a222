"""The batch of a script that runs on the simulated device: found by itself, and set without changing the script."""

import os
from contextlib import suppress
from typing import Any, Self

from hotloop.simulate.events import Listener, Operation
from hotloop.simulate.loaders import Loaders
from hotloop.simulate.options import Options
from hotloop.simulate.patches import Patches
from hotloop.simulate.record import Batch
from hotloop.simulate.ways import ScriptText, Way, batch_variables, look, rewritten, value_of

TRUST = ("argument", "environment", "variable", "loader")
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


def _kind(place: str) -> str:
    return place.partition(":")[0]

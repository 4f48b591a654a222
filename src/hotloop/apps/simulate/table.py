"""The constants behind a time: one table per architecture, fitted on a real card, or a default that says so."""

import json
from dataclasses import dataclass, field
from functools import lru_cache

from hotloop.apps.simulate.library_memory import TABLES
from hotloop.apps.simulate.nearby import Nearby
from hotloop.apps.simulate.products import WorkPart
from hotloop.records import Record

HOST = "hopper"  # the architecture whose machine was measured
_SAME = {"fp16": "bf16", "bf16": "fp16", "tf32": "bf16", "fp64": "fp32", "fp8": "bf16"}  # the next of kin


@dataclass(frozen=True)
class Curve(Record):
    """How near an operation of one family comes to what a card can do.

    A latency and a rate: work over (work + half-work) of the best rate, half-work being what the latency would hold.
    """

    latency: float  # seconds of each kernel
    memory: float  # share of the bandwidth, of much work
    compute: float = 1.0  # share of the peak, of much work
    sharpness: float = 8.0  # 1: computing and moving add up; large: the longer one hides the other
    tile: float = 0.0  # elements of a tile of the result at which a product is half as quick as with huge tiles
    spread: float = 0.3  # of the logarithm of the time, about what the curve says
    samples: int = 0  # measurements that it was fitted to


@dataclass(frozen=True)
class Link(Record):
    """Copies between host and device, as shares of the link's speed."""

    pinned: float = 0.85
    pageable: float = 0.3
    latency: float = 10e-6
    spread: float = 0.3


@dataclass(frozen=True)
class HostCost(Record):
    """Seconds that the host needs for Python, the dispatcher and the launch of one operation.

    Views are no operations of the device, so their time is in that of the operations around them. `other` is for what
    is neither forward nor backward nor optimizer.
    """

    forward: float = 11e-6
    backward: float = 8e-6
    optimizer: float = 9e-6
    other: float = 6e-6
    tensor: float = 0.6e-6  # each tensor of a foreach or fused operation
    launch: float = 2e-6  # each kernel after the first
    copy: float = 8e-6
    wait: float = 8e-6
    spread: float = 0.3
    name: str = ""  # the machine that was measured


@dataclass(frozen=True)
class ArchitectureTable(Record):
    """All constants of an architecture."""

    architecture: str = ""
    card: str = ""  # that was measured; none in the default
    torch: str = ""
    date: str = ""
    floor: float = 1.5e-6  # seconds from one kernel to the next
    cache: float = 2.0  # how much quicker than memory the L2 cache is
    common: float = 0.15  # spread of all operations together: clocks, neighbours, what no single operation shows
    curves: dict[str, Curve] = field(default_factory=dict)
    nearby: dict[str, Nearby] = field(default_factory=dict)  # by the names of curves: where these are off
    link: Link = field(default_factory=Link)
    host: HostCost = field(default_factory=HostCost)  # of the machine with the card; forecasts use one for all cards

    def curve(self, part: WorkPart) -> Curve:
        """The curve of a part: its own, else of its kin, else the default's."""
        key = self._key(part)
        if key is not None:
            return self.curves[key]
        if not self.card:
            return Curve(latency=2e-6, memory=0.6, compute=0.4, spread=0.5)
        return default_table().curve(part)

    def correction(self, part: WorkPart) -> float:
        """The logarithm of how much longer a part takes than its curve says, after what was measured nearby."""
        key = self._key(part)
        found = self.nearby.get(key) if key is not None else None
        return 0.0 if found is None else found.correction(part.traits)

    def _key(self, part: WorkPart) -> str | None:
        return next((key for key in keys_of(part) if key in self.curves), None)


def keys_of(part: WorkPart) -> list[str]:
    """The names of the curves that may serve a part, the most particular first.

    >>> keys_of(WorkPart("norm", variant="layer"))[:3]
    ['norm:layer/fp32', 'norm:layer', 'norm/fp32']
    """
    precisions = [*dict.fromkeys([part.precision, _SAME.get(part.precision, part.precision)])]
    layouts = [f"/{part.layout}", ""] if part.layout else [""]
    families = [f"{part.family}:{part.variant}", part.family] if part.variant else [part.family]
    return [
        key for family in families for key in (*(f"{family}/{p}{lay}" for p in precisions for lay in layouts), family)
    ]


@lru_cache(maxsize=8)
def load(architecture: str) -> ArchitectureTable:
    """The table of an architecture, or the default where no card of it was measured.

    >>> load("of no card").card
    ''
    """
    file = TABLES / f"time-{architecture}.json"
    return ArchitectureTable.from_json(json.loads(file.read_text())) if file.exists() else default_table()


def default_table() -> ArchitectureTable:
    """What is used for cards that nobody measured."""
    return load("default")


def default_host() -> HostCost:
    """The host of every forecast: what an operation costs it is no property of the card that it is launched on."""
    return load(HOST).host

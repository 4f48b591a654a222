"""The GPUs that people own or rent, as their data sheets have them, and how to find one by name."""

import json
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from hotloop.errors import BadArgument
from hotloop.printing.text import printable, shorten, size
from hotloop.records import Record

TABLE = Path(__file__).with_name("tables") / "cards.json"
_VENDOR = re.compile(r"nvidia|geforce|tesla|graphics|gpu|generation|hbm\de?|(?<=\d)[\s_-]*gi?b")
_UNITS = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Card(Record):
    """A GPU without the GPU: bytes, bytes per second, operations per second, hertz."""

    key: str  # such as rtx4090
    name: str  # as the driver says it; two sizes of a card may share it
    architecture: str  # pascal, volta, turing, ampere, ada, hopper, blackwell
    capability: tuple[int, int]
    memory: int  # what CUDA reports as the total, and a process can get, its CUDA context included
    bandwidth: float
    peaks: dict[str, float]  # dense, by fp32, tf32, fp16, bf16, fp8; what a card cannot do is absent
    sms: int
    clock: float  # boost
    pcie: float  # in one direction
    generic: bool = False  # only the memory was given; the rest is that of a card of about its size


@lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """Every card of the table, the oldest first."""
    return tuple(
        Card(
            key=row["key"],
            name=row["name"],
            architecture=row["architecture"],
            capability=(row["capability"][0], row["capability"][1]),
            memory=int(row["memory_gib"] * 2**30) // 2**21 * 2**21,
            bandwidth=row["bandwidth_gbs"] * 1e9,
            peaks={dtype: rate * 1e12 for dtype, rate in row["tflops"].items()},
            sms=row["sms"],
            clock=row["clock_mhz"] * 1e6,
            pcie=row["pcie_gbs"] * 1e9,
        )
        for row in json.loads(TABLE.read_text(encoding="utf-8"))["cards"]
    )


def card(name: str) -> Card:
    """The card that a name means, however it is spelt.

    >>> card("RTX 4090").key, card("NVIDIA A100-SXM4-80GB").key, card("4090").key
    ('rtx4090', 'a100-80', 'rtx4090')
    """
    found = _spellings().get(_plain(name))
    if found is None:
        near = near_names(name)
        raise BadArgument(
            f"no GPU is known as {printable(name)!r}",
            fix=f"did you mean {shorten(near)}? Or give its memory alone, as in --vram 24GiB"
            if near
            else f"give its memory alone, as in --vram 24GiB; the known ones are: {', '.join(e.key for e in cards())}",
        )
    return found


def near_names(name: str, limit: int = 5) -> list[str]:
    """Keys of cards whose names are like this one, the likeliest first.

    >>> near_names("rtx4090xt", limit=1)
    ['rtx4090']
    """
    close = get_close_matches(_plain(name), list(_spellings()), n=4 * limit, cutoff=0.55)
    return list(dict.fromkeys(_spellings()[each].key for each in close))[:limit]


def generic(memory: int | str) -> Card:
    """A card of which only the memory is known; the rest is that of the card of the table nearest in size.

    >>> generic("24GiB").name
    'a GPU with 24.0 GiB'
    """
    amount = _bytes_of(memory)
    nearest = min(cards(), key=lambda each: abs(each.memory - amount))
    key = f"vram-{size(amount)}".replace(" ", "")
    return replace(nearest, key=key, name=f"a GPU with {size(amount)}", memory=amount, generic=True)


def _bytes_of(memory: int | str) -> int:
    fix = "give bytes, or words such as 24GiB or 24GB"
    if isinstance(memory, str):
        read = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([mgt]i?b|)\s*", memory, re.IGNORECASE)
        if read is None:
            raise BadArgument(f"{printable(memory)!r} is no amount of memory", fix=fix)
        memory = int(float(read[1]) * _UNITS.get(read[2].lower(), 1))
    if memory < 2**28:  # less than a CUDA context: surely a unit was forgotten
        raise BadArgument(f"a GPU with {size(memory)} of memory cannot hold a CUDA context", fix=fix)
    return memory


def _plain(name: str) -> str:
    """A name without what people leave out or spell in their own way."""
    return re.sub(r"[^a-z0-9]+", "", _VENDOR.sub("", name.lower()))


@lru_cache(maxsize=1)
def _spellings() -> dict[str, Card]:
    """Plain spelling → card. Of two cards that share a name, it means the one that was listed first."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["cards"]
    spelt = [(spelling, row) for row in rows for spelling in (row["key"], *row.get("aliases", ()))]
    spelt += [(row["name"], row) for row in rows]
    spelt += [(row["key"].removeprefix("rtx"), row) for row in rows]
    by_key = {each.key: each for each in cards()}
    found: dict[str, Card] = {}
    for spelling, row in spelt:
        found.setdefault(_plain(spelling), by_key[row["key"]])
    return found

"""What lessons import: a GPU, real or simulated, and numbers measured here beside those of a named GPU."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hotloop
from hotloop._torch import DispatchMode
from hotloop.apps.simulate.simulation_record import Copy, DeviceFinding, Sync
from hotloop.placement.sites import Site, user_site
from hotloop.placement.waits import waits
from hotloop.printing.text import duration, plural, size
from hotloop.records import Timing

REFERENCE = Path(__file__).with_name("reference.json")
TO_DEVICE = "to the device"
recorded: dict[str, str] = {}  # every row that `beside` has shown in this process


@dataclass
class GpuRecord:
    """What happened on the GPU inside a `gpu()` block: known when the block ends, or when `settle` is called in it."""

    simulated: bool
    name: str
    settle: Callable[[], None]
    copies: tuple[Copy, ...] = ()  # between host and device, by line
    waits: tuple[Sync, ...] = ()  # of the host for the device, by line
    findings: tuple[DeviceFinding, ...] = ()  # what a simulated GPU repaired; a real one raises an error instead
    peak: int = 0  # bytes in tensors

    def __str__(self) -> str:
        """Every copy and every wait by its line, such as `line 3: 2 copies to the device, pageable: the CPU waits`."""
        said = [
            (each.line, f"{plural(each.count, 'copy', 'copies')} {each.direction}, "
             f"{'pinned' if each.pinned else 'pageable'}: the CPU {'waits' if each.blocking else 'goes on'}")
            for each in self.copies
        ]  # fmt: skip
        said += [(each.line, f"the CPU waits {plural(each.count, 'time')} ({each.kind})") for each in self.waits]
        return "\n".join(f"line {line}: {what}" for line, what in sorted(said)) or "no copies, no waits"

    @property
    def mismatches(self) -> tuple[DeviceFinding, ...]:
        """Operations that were given tensors of two devices."""
        return tuple(found for found in self.findings if found.level == "error")


@contextmanager
def gpu(*, quiet: bool = False, values: bool = True) -> Iterator[GpuRecord]:
    """A block in which "cuda" is there: the GPU of this machine, or else a simulated one, which says so.

    On the simulated one values are computed too, on the CPU, unless they are not wanted; then large tensors cost
    nothing. An operation between two devices is noted and repaired.
    """
    with _real() if torch.cuda.is_available() else _simulated(quiet, values) as seen:
        try:
            yield seen
        finally:
            seen.settle()


@contextmanager
def _simulated(quiet: bool, values: bool) -> Iterator[GpuRecord]:
    simulation = hotloop.simulate("h200", values=values)

    def settle() -> None:
        found = simulation.result  # computed anew each time it is asked for in the block
        seen.copies, seen.waits, seen.findings = found.copies, found.syncs, found.findings
        seen.peak = found.peak.allocated if found.peak is not None else 0

    seen = GpuRecord(simulated=True, name=simulation.card.name, settle=settle)
    with simulation:
        if not quiet:
            print(f"(on a simulated {seen.name}: there is no CUDA GPU here)")
        yield seen


@contextmanager
def _real() -> Iterator[GpuRecord]:
    """The same facts from a real GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    copies = _Copies()

    def settle() -> None:
        seen.copies = tuple(
            Copy(file, line, way, copies.bytes[file, line, way, pinned, blocking], pinned, blocking, count)
            for (file, line, way, pinned, blocking), count in copies.counts.items()
        )
        seen.waits = tuple(copies.other_waits(noted.sites))
        seen.peak = torch.cuda.max_memory_allocated()

    seen = GpuRecord(simulated=False, name=torch.cuda.get_device_name(), settle=settle)
    with waits() as noted, copies:
        yield seen


_READS = {torch.ops.aten._local_scalar_dense: "item", torch.ops.aten.equal: "equal"}


class _Copies(DispatchMode):
    """Notes every copy between host and device with its line, and what reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.bytes: Counter[tuple[Any, ...]] = Counter()
        self._reads: dict[Site | None, str] = {}  # what else makes the host wait, by line

    def other_waits(self, sites: "Counter[Site | None]") -> Iterator[Sync]:
        """Waits that are not those of a copy: PyTorch tells of both alike."""
        copied: Counter[Site] = Counter()
        for (file, line, _, _, blocking), count in self.counts.items():
            copied[Site(file, line)] += count * blocking
        for site, count in sites.items():
            if site is not None and count > copied[site]:
                yield Sync(site.file, site.line, self._reads.get(site, "synchronization"), count - copied[site])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in _READS:
            self._reads[user_site()] = _READS[func.overloadpacket]
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[0] if func.overloadpacket is torch.ops.aten._to_copy else args[1]
            if isinstance(source, torch.Tensor) and source.device.type != result.device.type:
                there = source.device.type == "cpu"
                host, way = (source, TO_DEVICE) if there else (result, "to the host")
                blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
                site = user_site()
                key = (site.file if site else "", site.line if site else 0, way, host.is_pinned(), blocking)
                self.counts[key] += 1
                self.bytes[key] += source.nbytes
        return result


def race(
    calls: Mapping[str, Callable[[], Any]], device: str | torch.device = "cpu", rounds: int = 5
) -> dict[str, float]:
    """Seconds of each call, measured in turns so that a busy moment of the machine hits all of them alike.

    Each round is warmed up and synchronized (`hotloop.measure`); the quickest of the rounds counts, since other
    programs can only make one slower.

    >>> sorted(race({"a": lambda: None, "b": lambda: None}, rounds=1))
    ['a', 'b']
    """
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best[name], hotloop.measure(call, device=device, warmup=1, repeats=3).median)
    return best


@cache
def reference() -> Any:
    """Rows that were measured on a named GPU; nothing where there is no file of them."""
    return json.loads(REFERENCE.read_text(encoding="utf-8")) if REFERENCE.is_file() else {"gpu": "H200", "rows": {}}


def beside(rows: Mapping[str, "Timing | float | int | str"], *, here: str = "here") -> None:
    """Print what was measured here beside the same rows on a named GPU: seconds as floats, bytes as integers.

    Where none of the rows was measured there, that column is left out.

    >>> beside({"one row": 0.002, "another": 2048}, here="cpu")
    what     cpu
    one row  2 ms
    another  2.0 KiB
    """
    said = {what: _words(value) for what, value in rows.items()}
    recorded.update(said)
    known = reference()
    table = [("what", here, known["gpu"])]
    table += [(what, value, known["rows"].get(what, "–")) for what, value in said.items()]
    columns = 3 if any(what in known["rows"] for what in said) else 2
    widths = [max(len(row[column]) for row in table) for column in range(columns)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())


def _words(value: "Timing | float | int | str") -> str:
    if isinstance(value, Timing):
        return duration(value.median)
    if isinstance(value, str):
        return value
    return size(value) if isinstance(value, int) else duration(value)

"""How much goes over PCIe: by the driver's counters, or by a question that is asked beside, since it takes long."""

import threading
from collections.abc import Callable
from typing import Any

from hotloop.monitor.failures import Failed

TX, RX = 197, 198  # NVML's fields: bytes sent and received, since driver 555
WIDE = (2, 3, 4)  # types of value with 64 bits; a counter of 32 would overflow several times between two readings
RHYTHM, FRESH = 1.0, 5.0  # seconds from one slow question to the next, and until its answer is too old to be shown
SELDOM = 60.0  # seconds to the next, where the driver does not answer
KIB = 1024  # what NVML counts the answer in

Rates = tuple[float | None, float | None]  # sent and received, bytes a second
NOTHING: Rates = (None, None)


class Traffic:
    """Bytes a second from and to one GPU. A rate needs two looks, so that the first is unknown."""

    def __init__(self, ask: Callable[..., Any], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self._last: tuple[float, tuple[int, int]] | None = None
        self._meter: Meter | None = None

    def read(self) -> Rates:
        if self._meter is not None:
            return self._meter.read()
        fields = self._ask("nvmlDeviceGetFieldValues", (TX, RX))
        if fields is None or any(field.nvmlReturn != 0 or field.valueType not in WIDE for field in fields):
            self._last = None
            self._meter = Meter(self._ask, self._clock)
            return NOTHING
        now, counts = self._clock(), (int(fields[0].value.ullVal), int(fields[1].value.ullVal))
        last, self._last = self._last, (now, counts)
        if last is None or now <= last[0]:
            return NOTHING
        sent, received = ((new - old) / (now - last[0]) for new, old in zip(counts, last[1], strict=True))
        return (sent if sent >= 0 else None, received if received >= 0 else None)  # a counter may begin anew

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()


class Meter:
    """A thread that asks for the throughput: the driver watches the bus for 20 ms a direction before it answers."""

    def __init__(self, ask: Callable[..., Any], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self._told: tuple[float, Rates] = (-float("inf"), NOTHING)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotloop pcie", daemon=True)
        self._thread.start()

    def read(self) -> Rates:
        when, rates = self._told
        return rates if self._clock() - when <= FRESH else NOTHING

    def close(self) -> None:
        self._end.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        while True:
            rates = (self._rate(0), self._rate(1))
            self._told = (self._clock(), rates)
            if self._end.wait(SELDOM if rates == NOTHING else RHYTHM):
                return

    def _rate(self, direction: int) -> float | None:
        try:
            told = self._ask("nvmlDeviceGetPcieThroughput", direction)
        except Failed:  # a GPU or library that has gone is told of by the reading that meets it
            return None
        return None if told is None else float(told) * KIB

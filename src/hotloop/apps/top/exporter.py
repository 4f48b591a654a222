"""A reading for Prometheus, with the names, units and labels of NVIDIA's DCGM exporter where it has them."""

import math
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from hotloop.apps.top.feed import HardwareSample
from hotloop.monitor.reading import Gpu
from hotloop.printing.text import printable

# Every name here is of the oldest kind, so the oldest version of the format is right and every Prometheus reads it.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("gpu", "UUID", "modelName", "Hostname")

# Name, what it is, the field of the reading, and what that is multiplied with to be in the unit of the metric.
OF_GPU = (
    ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", "utilisation", 1.0),
    ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", "memory_used", 2**-20),
    ("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", "memory_free", 2**-20),
    ("DCGM_FI_DEV_FB_TOTAL", "Framebuffer memory in all (in MiB).", "memory_total", 2**-20),
    ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", "temperature", 1.0),
    ("DCGM_FI_DEV_FAN_SPEED", "Fan speed (in %).", "fan", 1.0),
    ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", "power", 1.0),
    ("DCGM_FI_DEV_POWER_MGMT_LIMIT", "Power limit (in W).", "power_limit", 1.0),
    ("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", "clock", 1.0),
    ("DCGM_FI_DEV_MAX_SM_CLOCK", "Highest SM clock frequency (in MHz).", "clock_most", 1.0),
    ("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", "memory_clock", 1.0),
    ("DCGM_FI_DEV_MAX_MEM_CLOCK", "Highest memory clock frequency (in MHz).", "memory_clock_most", 1.0),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "Sent by the GPU over PCIe (in bytes per second).", "sent", 1.0),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "Received by the GPU over PCIe (in bytes per second).", "received", 1.0),
    ("hotloop_gpu_readable", "1 where the GPU can be read, 0 where it fails.", "error", 1.0),
    ("hotloop_gpu_processes", "Processes that hold memory of the GPU.", "processes", 1.0),
    ("hotloop_gpu_throttled", "1 where something holds the clocks down.", "throttled", 1.0),
)
GROWING = (  # only; but prometheus-client would add _total to the name of a counter
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded (in mJ).", "energy", 1000.0),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "Corrected memory errors since the driver was loaded.", "ecc_corrected", 1.0),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrected memory errors since the driver was loaded.", "ecc_uncorrected", 1.0),
)
OF_HOST = (
    ("hotloop_host_cpu_percent", "Use of all cores together (in %).", "cpu"),
    ("hotloop_host_cores", "Cores of the host.", "cores"),
    ("hotloop_host_memory_used_bytes", "Memory in use.", "memory_used"),
    ("hotloop_host_memory_total_bytes", "Memory in all.", "memory_total"),
    ("hotloop_host_swap_used_bytes", "Swap in use.", "swap_used"),
    ("hotloop_host_disk_read_bytes_per_second", "Read from disks.", "disk_read"),
    ("hotloop_host_disk_written_bytes_per_second", "Written to disks.", "disk_written"),
    ("hotloop_host_net_received_bytes_per_second", "Received from networks.", "net_received"),
    ("hotloop_host_net_sent_bytes_per_second", "Sent to networks.", "net_sent"),
)


def metrics(sample: HardwareSample | None) -> bytes:
    """A sample in Prometheus' text format; what is unknown is left out."""
    registry = CollectorRegistry()  # its own, so that nothing of the process at large is changed or shown
    registry.register(_Collector(sample))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, sample: HardwareSample | None) -> None:
        self.sample = sample

    def collect(self) -> Iterable[Metric]:
        return (metric for metric in families(self.sample) if metric.samples)


def families(sample: HardwareSample | None) -> Iterator[Metric]:
    """Every metric, those without a value included."""
    if sample is None or sample.reading is None:
        return
    reading = sample.reading
    host = printable(reading.host.name or "")
    known = [(gpu, (str(gpu.index), printable(gpu.uuid or ""), printable(gpu.name), host)) for gpu in reading.gpus]
    for kind, rows in ((GaugeMetricFamily, OF_GPU), (UnknownMetricFamily, GROWING)):
        for name, words, field, unit in rows:
            family = kind(name, words, labels=LABELS)
            for gpu, labels in known:
                _add(family, labels, _number(gpu, field, unit))
            yield family
    reasons = GaugeMetricFamily(
        "hotloop_gpu_throttle_reason", "What holds the clocks down.", labels=(*LABELS, "reason")
    )
    for gpu, labels in known:
        for reason in dict.fromkeys(map(printable, gpu.throttled or ())):
            _add(reasons, (*labels, reason), 1)
    yield reasons
    for name, words, field in OF_HOST:
        family = GaugeMetricFamily(name, words, labels=("Hostname",))
        _add(family, (host,), getattr(reading.host, field))
        yield family
    advice = GaugeMetricFamily("hotloop_advice", "Pieces of advice by rule.", labels=("rule", "gpu", "Hostname"))
    given = [(printable(piece.rule), "" if piece.gpu is None else str(piece.gpu), host) for piece in sample.advice]
    for key in dict.fromkeys(given):
        _add(advice, key, given.count(key))
    yield advice
    when = GaugeMetricFamily("hotloop_reading_time_seconds", "When this was read, since 1970.", labels=("Hostname",))
    _add(when, (host,), reading.time)
    yield when


def _add(family: GaugeMetricFamily | UnknownMetricFamily, labels: tuple[str, ...], value: float | None) -> None:
    if value is not None and math.isfinite(value):
        family.add_metric(labels, value)


def _number(gpu: Gpu, field: str, unit: float) -> float | None:
    """A number of a GPU: how many processes, whether there is no error, whether anything holds it back."""
    value = getattr(gpu, field)
    if field == "error":
        return float(value is None)
    if field == "processes" and value is not None:
        return len(value)
    return None if value is None else unit * (bool(value) if field == "throttled" else value)

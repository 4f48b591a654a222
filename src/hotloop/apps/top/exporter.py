"""A reading for Prometheus, with the names, units and labels of NVIDIA's DCGM exporter where it has them."""

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from hotloop.apps.top.feed import HardwareSample
from hotloop.monitor.reading import Gpu, Host
from hotloop.printing.text import printable

# Every name here is of the oldest kind, so the oldest version of the format is right and every Prometheus reads it.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("gpu", "UUID", "modelName", "Hostname")

# Name, what it is, the value. Three of them only grow, but prometheus-client would add _total to the name of a counter.
OF_GPU: tuple[tuple[str, str, Callable[[Gpu], float | None]], ...] = (
    ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", lambda gpu: gpu.utilisation),
    ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", lambda gpu: _mebibytes(gpu.memory_used)),
    ("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", lambda gpu: _mebibytes(gpu.memory_free)),
    ("DCGM_FI_DEV_FB_TOTAL", "Framebuffer memory in all (in MiB).", lambda gpu: _mebibytes(gpu.memory_total)),
    ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", lambda gpu: gpu.temperature),
    ("DCGM_FI_DEV_FAN_SPEED", "Fan speed (in %).", lambda gpu: gpu.fan),
    ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", lambda gpu: gpu.power),
    ("DCGM_FI_DEV_POWER_MGMT_LIMIT", "Power limit (in W).", lambda gpu: gpu.power_limit),
    ("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", lambda gpu: gpu.clock),
    ("DCGM_FI_DEV_MAX_SM_CLOCK", "Highest SM clock frequency (in MHz).", lambda gpu: gpu.clock_most),
    ("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", lambda gpu: gpu.memory_clock),
    ("DCGM_FI_DEV_MAX_MEM_CLOCK", "Highest memory clock frequency (in MHz).", lambda gpu: gpu.memory_clock_most),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "Sent by the GPU over PCIe (in bytes per second).", lambda gpu: gpu.sent),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "Received by the GPU over PCIe (in bytes per second).", lambda gpu: gpu.received),
    ("hotloop_gpu_readable", "1 where the GPU can be read, 0 where it fails.", lambda gpu: float(gpu.error is None)),
    (
        "hotloop_gpu_processes",
        "Processes that hold memory of the GPU.",
        lambda gpu: None if gpu.processes is None else len(gpu.processes),
    ),
    (
        "hotloop_gpu_throttled",
        "1 where something holds the clocks down.",
        lambda gpu: None if gpu.throttled is None else float(bool(gpu.throttled)),
    ),
)
GROWING: tuple[tuple[str, str, Callable[[Gpu], float | None]], ...] = (
    (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy since the driver was loaded (in mJ).",
        lambda gpu: None if gpu.energy is None else gpu.energy * 1000,
    ),
    (
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
        "Corrected memory errors since the driver was loaded.",
        lambda gpu: gpu.ecc_corrected,
    ),
    (
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "Uncorrected memory errors since the driver was loaded.",
        lambda gpu: gpu.ecc_uncorrected,
    ),
)
OF_HOST: tuple[tuple[str, str, Callable[[Host], float | None]], ...] = (
    ("hotloop_host_cpu_percent", "Use of all cores together (in %).", lambda host: host.cpu),
    ("hotloop_host_cores", "Cores of the host.", lambda host: host.cores),
    ("hotloop_host_memory_used_bytes", "Memory in use.", lambda host: host.memory_used),
    ("hotloop_host_memory_total_bytes", "Memory in all.", lambda host: host.memory_total),
    ("hotloop_host_swap_used_bytes", "Swap in use.", lambda host: host.swap_used),
    ("hotloop_host_disk_read_bytes_per_second", "Read from disks.", lambda host: host.disk_read),
    ("hotloop_host_disk_written_bytes_per_second", "Written to disks.", lambda host: host.disk_written),
    ("hotloop_host_net_received_bytes_per_second", "Received from networks.", lambda host: host.net_received),
    ("hotloop_host_net_sent_bytes_per_second", "Sent to networks.", lambda host: host.net_sent),
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
        for name, words, value in rows:
            family = kind(name, words, labels=LABELS)
            for gpu, labels in known:
                _add(family, labels, value(gpu))
            yield family
    reasons = GaugeMetricFamily(
        "hotloop_gpu_throttle_reason", "What holds the clocks down.", labels=(*LABELS, "reason")
    )
    for gpu, labels in known:
        for reason in dict.fromkeys(map(printable, gpu.throttled or ())):
            _add(reasons, (*labels, reason), 1)
    yield reasons
    for name, words, of_host in OF_HOST:
        family = GaugeMetricFamily(name, words, labels=("Hostname",))
        _add(family, (host,), of_host(reading.host))
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


def _mebibytes(size: float | None) -> float | None:
    return None if size is None else size / 2**20

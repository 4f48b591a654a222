"""The exporter: names, units and labels of DCGM, nothing for what is unknown, and no name that breaks the format."""

import math
from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.exporter import metrics
from hotloop.apps.top.feed import HardwareSample
from hotloop.monitor.reading import Gpu, Host, Process, Reading
from hotloop.printing.text import printable

from .pretend import workstation

GPU = Gpu(
    index=3,
    name="NVIDIA H200",
    uuid="GPU-1",
    utilisation=87.0,
    memory_used=45 * 2**30,
    memory_free=96 * 2**30,
    memory_total=141 * 2**30,
    temperature=61.0,
    fan=40.0,
    power=512.5,
    power_limit=700.0,
    energy=1234.5,
    clock=1755.0,
    clock_most=1980.0,
    memory_clock=3201.0,
    memory_clock_most=3202.0,
    throttled=("power cap", "heat"),
    sent=41e6,
    received=1.3e9,
    ecc_corrected=4,
    ecc_uncorrected=1,
    processes=(Process(1, 2, "compute"), Process(2, 3, "compute")),
)
HOST = Host("kestrel", 22.5, 24, 7, 8, 9, 1.5, 2.5, 3.5, 4.5)


def parsed(sample: HardwareSample | None) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name → labels → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics(sample).decode()):
        for line in family.samples:
            labels = tuple(sorted(line.labels.items()))
            assert labels not in found.setdefault(line.name, {}), "the same line twice"
            found[line.name][labels] = line.value
    return found


def only(found: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str) -> float:
    [value] = found[name].values()
    return value


def test_a_gpu_has_the_names_units_and_labels_of_dcgm() -> None:
    found = parsed(HardwareSample(1, Reading(5.0, HOST, (GPU,))))
    assert "python_info" not in found
    assert b"DCGM" not in generate_latest(REGISTRY), "nothing of the process at large is shown or changed"
    expected = {
        "DCGM_FI_DEV_GPU_UTIL": 87,
        "DCGM_FI_DEV_FB_USED": 45 * 1024,
        "DCGM_FI_DEV_FB_FREE": 96 * 1024,
        "DCGM_FI_DEV_FB_TOTAL": 141 * 1024,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_FAN_SPEED": 40,
        "DCGM_FI_DEV_POWER_USAGE": 512.5,
        "DCGM_FI_DEV_POWER_MGMT_LIMIT": 700,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1_234_500,
        "DCGM_FI_DEV_SM_CLOCK": 1755,
        "DCGM_FI_DEV_MAX_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 3201,
        "DCGM_FI_DEV_MAX_MEM_CLOCK": 3202,
        "DCGM_FI_PROF_PCIE_TX_BYTES": 41e6,
        "DCGM_FI_PROF_PCIE_RX_BYTES": 1.3e9,
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 4,
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 1,
        "hotloop_gpu_readable": 1,
        "hotloop_gpu_processes": 2,
        "hotloop_gpu_throttled": 1,
    }
    assert {name: only(found, name) for name in expected} == expected
    labels = (("Hostname", "kestrel"), ("UUID", "GPU-1"), ("gpu", "3"), ("modelName", "NVIDIA H200"))
    assert {labels} == {key for name in expected for key in found[name]}
    assert {dict(key)["reason"] for key in found["hotloop_gpu_throttle_reason"]} == {"power cap", "heat"}


def test_the_host_has_names_of_its_own() -> None:
    found = parsed(HardwareSample(1, Reading(5.0, HOST)))
    assert {name: only(found, name) for name in found} == {
        "hotloop_host_cpu_percent": 22.5,
        "hotloop_host_cores": 24,
        "hotloop_host_memory_used_bytes": 7,
        "hotloop_host_memory_total_bytes": 8,
        "hotloop_host_swap_used_bytes": 9,
        "hotloop_host_disk_read_bytes_per_second": 1.5,
        "hotloop_host_disk_written_bytes_per_second": 2.5,
        "hotloop_host_net_received_bytes_per_second": 3.5,
        "hotloop_host_net_sent_bytes_per_second": 4.5,
        "hotloop_reading_time_seconds": 5,
    }


def test_what_is_unknown_is_left_out() -> None:
    assert parsed(None) == parsed(HardwareSample(1, trouble="no")) == {}
    lost = parsed(HardwareSample(1, Reading(5.0, Host(), (Gpu(0, "H200", error="GPU is lost"),))))
    assert set(lost) == {"hotloop_gpu_readable", "hotloop_reading_time_seconds"}
    assert only(lost, "hotloop_gpu_readable") == 0
    strange = replace(GPU, power=math.nan, clock=math.inf, temperature=-math.inf)
    names = {"DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_TEMP"}
    assert not names & set(parsed(HardwareSample(1, Reading(5.0, HOST, (strange,)))))


def test_advice_is_counted_by_rule() -> None:
    held = Advice("idle-memory", 1, "4.1 GiB is held")
    found = parsed(
        HardwareSample(1, workstation(0), (held, replace(held, words="and 2"), Advice("host-memory", None, "full")))
    )
    counted = {(dict(key)["rule"], dict(key)["gpu"]): value for key, value in found["hotloop_advice"].items()}
    assert counted == {("idle-memory", "1"): 2, ("host-memory", ""): 1}


def test_every_number_of_a_gpu_is_exported_or_left_out_on_purpose() -> None:
    told = metrics(HardwareSample(1, Reading(5.0, HOST, (GPU,))))
    for field in fields(Gpu):
        if field.name not in {"index", "name", "uuid"}:
            unknown = 0 if field.name == "error" else None
            less = metrics(HardwareSample(1, Reading(5.0, HOST, (replace(GPU, **{field.name: unknown}),))))
            assert less != told, field.name


GARBAGE = st.text(st.characters())  # halves of surrogate pairs too, as in names of files that are not UTF-8


@given(GARBAGE, GARBAGE, GARBAGE, GARBAGE)
def test_garbage_in_names_stays_in_its_label(host: str, name: str, uuid: str, reason: str) -> None:
    gpu = replace(GPU, name=name, uuid=uuid, throttled=(reason, reason))
    found = parsed(HardwareSample(1, Reading(5.0, replace(HOST, name=host), (gpu,)), (Advice(reason, 0, name),)))
    plain = parsed(HardwareSample(1, Reading(5.0, HOST, (GPU,)), (Advice("rule", 0, ""),)))
    assert set(found) == set(plain)
    [labels] = found["hotloop_gpu_throttle_reason"]
    assert dict(labels) == {
        "gpu": "3",
        "Hostname": printable(host),
        "modelName": printable(name),
        "UUID": printable(uuid),
        "reason": printable(reason),
    }

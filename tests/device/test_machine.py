import platform
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hotloop.device import machine
from hotloop.device.facts import InstalledGpu
from hotloop.monitor.main_memory import machine_memory

GIB = 2**30


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC version: 12", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
        ("something else", None),
        ("", None),
        (None, None),
    ],
)
def test_driver_version(tmp_path: Path, text: str | None, version: str | None) -> None:
    plant(tmp_path, {} if text is None else {"proc/driver/nvidia/version": text})
    assert machine.driver_version(tmp_path) == version


def slot(number: int, vendor: str, kind: str) -> dict[str, str]:
    home = f"sys/bus/pci/devices/0000:0{number}:00.0"
    return {f"{home}/vendor": f"{vendor}\n", f"{home}/class": f"{kind}\n", f"{home}/device": "0x2335\n"}


def test_cards_on_the_bus_are_nvidia_display_controllers(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        slot(1, "0x10de", "0x030200")  # a GPU
        | slot(2, "0x10de", "0x040300")  # its sound
        | slot(3, "0x1002", "0x030000")  # another maker's
        | slot(4, "0x10de", "0x030000"),
    )
    names = ["NVIDIA GPU 0000:01:00.0 [10de:2335]", "NVIDIA GPU 0000:04:00.0 [10de:2335]"]
    assert machine.cards_on_bus(root, "Linux") == tuple(InstalledGpu(name) for name in names)


@pytest.mark.parametrize(
    ("files", "system", "cards"),
    [
        ({}, "Linux", None),
        ({}, "Windows", None),
        ({}, "Darwin", ()),
        (slot(1, "0x1002", "0x030000"), "Linux", ()),
        (slot(1, "0x1414", "0x030200") | {"dev/dxg": ""}, "Linux", None),
        (
            slot(1, "0x1af4", "0x020000")
            | {"proc/device-tree/compatible": "x\0nvidia,tegra234\0", "proc/device-tree/model": "Jetson Orin\0"},
            "Linux",
            (InstalledGpu("Jetson Orin"),),
        ),
    ],
    ids=["no bus", "Windows", "macOS", "AMD alone", "WSL", "Jetson"],
)
def test_cards_where_there_is_no_nvidia_on_the_bus(
    tmp_path: Path, files: dict[str, str], system: str, cards: tuple[InstalledGpu, ...] | None
) -> None:
    assert machine.cards_on_bus(plant(tmp_path, files), system) == cards


def test_nodes_say_which_may_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-modeset", "dev/null")
    plant(tmp_path, dict.fromkeys(names, ""))
    # root may open anything, so the answer of the system is given here
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith(("nvidia1", "uvm")))
    assert machine.nodes(tmp_path) == (
        ("/dev/nvidia0", "ok"),
        ("/dev/nvidia1", "denied"),
        ("/dev/nvidiactl", "ok"),
        ("/dev/nvidia-uvm", "denied"),
    )


@pytest.mark.parametrize(
    ("files", "environ", "inside"),
    [
        ({}, {}, False),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, False),
        ({".dockerenv": ""}, {}, True),
        ({"run/.containerenv": ""}, {}, True),
        ({}, {"container": "podman"}, True),
        ({"proc/1/cgroup": "0::/kubepods/besteffort/pod1\n"}, {}, True),
    ],
)
def test_in_container(tmp_path: Path, files: dict[str, str], environ: dict[str, str], inside: bool) -> None:
    assert machine.in_container(plant(tmp_path, files), environ) is inside


def test_cpu_name_of_a_kernel_that_gives_one(tmp_path: Path) -> None:
    plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n"})
    assert machine.cpu_name(tmp_path) == "AMD EPYC 9654 96-Core Processor"


def test_cpu_name_of_a_kernel_that_tells_nothing_is_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\n"})
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert machine.cpu_name(tmp_path) == "aarch64"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 3),
        ({"cpu.max": "max 100000"}, 3),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "150000"}, 1),
        ({"cpu.max": "nonsense"}, 3),
    ],
)
def test_cores_are_those_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 5, 7}, raising=False)
    plant(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert machine.cpu(tmp_path).usable == cores


NONE = str(2**63 - 4096)  # how the older control groups say that there is no limit
GROUPS = {  # files of control groups, free and total GiB of a machine with 60 of 64 GiB free
    "none": ({}, 60, 64),
    "no limit": ({"memory.max": "max", "memory.current": "5"}, 60, 64),
    "limit": ({"memory.max": 4 * GIB, "memory.current": GIB}, 3, 4),
    "above the machine": ({"memory.max": 2**62, "memory.current": GIB}, 60, 64),
    "all used": ({"memory.max": GIB, "memory.current": 2 * GIB}, 0, 1),
    "cached files": (
        {"memory.max": 4 * GIB, "memory.current": 4 * GIB, "memory.stat": f"anon 5\ninactive_file {2 * GIB}"},
        2,
        4,
    ),
    "older": (
        {
            "memory/memory.limit_in_bytes": 4 * GIB,
            "memory/memory.usage_in_bytes": 2 * GIB,
            "memory/memory.stat": f"total_inactive_file {GIB}",
        },
        3,
        4,
    ),
    "older without limit": ({"memory/memory.limit_in_bytes": NONE, "memory/memory.usage_in_bytes": GIB}, 60, 64),
    **{
        f"no sense {text!r}": ({"memory.max": text, "memory.current": text, "memory.stat": text}, 60, 64)
        for text in ("", "nonsense", "-5", "12 34", "\0")
    },
}


@pytest.fixture
def large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=60 * GIB, total=64 * GIB))


@pytest.mark.usefixtures("large_host")
@pytest.mark.parametrize(("files", "free", "total"), GROUPS.values(), ids=GROUPS)
def test_memory_of_a_container_is_its_share(tmp_path: Path, files: dict[str, object], free: int, total: int) -> None:
    plant(tmp_path, {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()})
    assert machine_memory(tmp_path) == (free * GIB, total * GIB)


@pytest.mark.usefixtures("large_host")
@pytest.mark.parametrize(
    ("line", "base", "limit", "used"),
    [
        ("0::/jobs/one", "", "memory.max", "memory.current"),
        ("7:cpu,memory:/jobs/one", "memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_tightest_group_around_the_process_counts(
    tmp_path: Path, line: str, base: str, limit: str, used: str
) -> None:
    groups = {"jobs": (8 * GIB, 7 * GIB), "jobs/one": (6 * GIB, GIB), "other": (1, 1)}
    plant(tmp_path, {"proc/self/cgroup": f"1:name=systemd:/x\n{line}\n"})
    for group, figures in groups.items():
        for name, value in zip((limit, used), figures, strict=True):
            plant(tmp_path, {f"sys/fs/cgroup/{base}{group}/{name}": str(value)})
    assert machine_memory(tmp_path) == (GIB, 6 * GIB)

import platform
from pathlib import Path

import psutil
import pytest

from hotloop.device import machine
from hotloop.device.facts import InstalledGpu


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
    ],
)
def test_driver_version(tmp_path: Path, text: str, version: str | None) -> None:
    assert machine.driver_version(plant(tmp_path, {"proc/driver/nvidia/version": text})) == version


def test_no_driver_file(tmp_path: Path) -> None:
    assert machine.driver_version(tmp_path) is None


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


@pytest.mark.parametrize(
    ("files", "variant"),
    [({}, None), ({"dev/dxg": ""}, "wsl"), ({"proc/device-tree/compatible": "nvidia,tegra194\0"}, "jetson")],
)
def test_variant(tmp_path: Path, files: dict[str, str], variant: str | None) -> None:
    assert machine.variant(plant(tmp_path, files)) == variant


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


ARM_CORE = """processor	: 0
BogoMIPS	: 243.75
CPU implementer	: {}
CPU architecture: 8
CPU variant	: 0x3
CPU part	: {}
CPU revision	: 1

"""


@pytest.mark.parametrize(
    ("cores", "name"),
    [
        ([("0x41", "0xd0c")] * 2, "ARM Neoverse-N1"),
        ([("0x41", "0xd4f")], "ARM Neoverse-V2"),
        ([("0x41", "0xd05"), ("0x41", "0xd0b")], "ARM Cortex-A55 and Cortex-A76"),
        ([("0xc0", "0xac3")], "Ampere One"),
        ([("0x61", "0x123")], "Apple part 0x123"),
    ],
)
def test_cpu_name_of_an_arm_kernel_is_that_of_its_design(
    tmp_path: Path, cores: list[tuple[str, str]], name: str
) -> None:
    plant(tmp_path, {"proc/cpuinfo": "".join(ARM_CORE.format(*core) for core in cores)})
    assert machine.cpu_name(tmp_path) == name


def test_cpu_name_of_a_kernel_that_tells_nothing_is_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\n"})
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert machine.cpu_name(tmp_path) == "aarch64"


def test_cores_are_those_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 5, 7}, raising=False)
    assert machine.cpu(tmp_path).usable == 3


@pytest.mark.parametrize(
    ("limit", "free", "total"),
    [("max", None, None), ("4096", 3096, 4096), (str(2**62), None, None), ("500", 0, 500)],
    ids=["no limit", "limit", "limit above the machine", "all used"],
)
def test_memory_of_a_container_is_its_share(tmp_path: Path, limit: str, free: int | None, total: int | None) -> None:
    plant(tmp_path, {"sys/fs/cgroup/memory.max": f"{limit}\n", "sys/fs/cgroup/memory.current": "1000\n"})
    cpu = machine.cpu(tmp_path)
    assert cpu.total == (psutil.virtual_memory().total if total is None else total)
    assert free is None or cpu.free == free

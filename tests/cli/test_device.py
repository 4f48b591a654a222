"""`hotloop device`: machines of every kind in words and as data, and what a script may require."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hotloop import __version__
from hotloop.device import Choice
from hotloop.device.facts import Cpu, InstalledGpu, MachineFacts, VisibleGpu
from hotloop.device.picking import pick_from
from hotloop.printing.text import wrap

from .conftest import Done, Run

GIB = 2**30
GPU = VisibleGpu(0, "NVIDIA H200", (9, 0), 130 * GIB, 139 * GIB)
CUDA = MachineFacts(
    torch_version="2.13.0+cu130",
    torch_cuda="13.0",
    arch_list=("sm_80", "sm_90"),
    cudnn="9.10.2",
    gpus=(GPU,),
    driver="580.95.05",
    driver_cuda=(13, 0),
    hardware=(InstalledGpu("NVIDIA H200"),),
    nodes=tuple((node, "ok") for node in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")),
    cpu=Cpu("AMD EPYC", 96, 192, 16, 100 * GIB, 128 * GIB),
)
NO_NODES = replace(CUDA, gpus=(), nodes=(), in_container=True)
SEVERAL = replace(
    CUDA, gpus=(GPU, VisibleGpu(1, "NVIDIA T4", (7, 5), 15 * GIB, 16 * GIB), replace(GPU, index=2, free=None))
)
CPU_ONLY = MachineFacts(torch_version="2.13.0+cpu", hardware=(), cpu=CUDA.cpu)


VERB = ("device",)
On = Callable[..., Done]


@pytest.fixture
def on(run: Run, monkeypatch: pytest.MonkeyPatch) -> On:
    """The command on a made-up machine."""
    for name in ("HOTLOOP_DEVICE", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(facts: MachineFacts, *arguments: str) -> Done:
        monkeypatch.setattr("hotloop.device.probe.probe", lambda: facts)
        return run(*arguments)

    return call


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            CUDA,
            [
                "cuda:0",
                "NVIDIA H200",
                "130.0 GiB free of 139.0 GiB",
                "9.0",
                "580.95.05",
                "13.0 in torch, 13.0 at most",
                "9.10.2",
                "bf16",
            ],
        ),
        (CPU_ONLY, ["AMD EPYC", "96 physical, 192 logical, 16 for this process", "100.0 GiB free", "no-hardware"]),
        (SEVERAL, ["cuda:1", "NVIDIA T4", "not usable", "cuda:2", "unknown free", "unsupported-arch"]),
        (NO_NODES, ["No GPU can be used", "no-nodes:", "`podman run --device nvidia.com/gpu=all ...`"]),
        (replace(CUDA, driver=None, driver_cuda=None, cudnn=None), ["unknown"]),
        (replace(CUDA, torch_hip="6.4", torch_cuda=None, arch_list=()), ["ROCm", "6.4"]),
        (MachineFacts(), ["unknown physical, unknown logical"]),
    ],
    ids=["gpu", "cpu", "several", "no nodes", "unknown driver", "rocm", "nothing known"],
)
def test_the_panel(on: On, monkeypatch: pytest.MonkeyPatch, facts: MachineFacts, words: list[str], width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = on(facts)
    assert (code, err) == (0, "")
    for word in words:
        assert word in out
    assert max(map(len, out.splitlines())) <= width
    assert out.count("this machine has no NVIDIA GPU") <= 1, "a cause is told once"


def test_foreign_strings_are_shown_and_not_obeyed(on: On) -> None:
    name = "[red]evil[/red] [/] \x1b[2J"
    code, out, _ = on(replace(CUDA, gpus=(replace(GPU, name=name),), driver="[bold"))
    assert code == 0
    assert "[red]evil[/red] [/] \\x1b[2J" in out
    assert "[bold" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("facts", [CUDA, SEVERAL, NO_NODES, CPU_ONLY, MachineFacts()])
def test_json_is_one_object_with_all_that_is_known(on: On, facts: MachineFacts) -> None:
    code, out, _ = on(facts, "--json")
    data = json.loads(out)
    assert (code, data["hotloop"]) == (0, __version__)
    assert MachineFacts.from_json(data["machine"]) == facts
    assert str(Choice.from_json(data)) == str(pick_from(facts))


@pytest.mark.parametrize(
    ("facts", "arguments", "code", "words"),
    [
        (CUDA, ["--require", "cuda"], 0, []),
        (CPU_ONLY, ["--require", "cpu"], 0, []),
        (CPU_ONLY, ["--require", "cuda"], 3, ["--require cuda", "no NVIDIA GPU"]),
        (CUDA, ["--require", "cuda", "--device", "cpu"], 3, ["You asked for cpu."]),
        (CUDA, ["--require", "mps"], 3, ["--require mps", "cuda:0"]),
        (CUDA, ["--require", "gpu"], 2, ["'gpu' is not a kind", "cuda, mps, xpu, cpu"]),
        (CUDA, ["--device", "cuda:7"], 3, ["cuda:7", "cuda:0 (NVIDIA H200), cpu"]),
        (CUDA, ["-d", "gpu"], 2, ["did you mean 'cuda'?"]),
        (CUDA, ["-d", ""], 2, ["not the name of a device"]),
        (CUDA, ["-d", "cpu"], 0, []),
    ],
)
def test_exit_codes_and_what_is_said_on_stderr(
    on: On, facts: MachineFacts, arguments: list[str], code: int, words: list[str]
) -> None:
    ended, _, err = on(facts, *arguments)
    assert ended == code
    assert bool(err) is bool(code)
    for word in words:
        assert word in err
    assert "Traceback" not in err


def test_require_still_prints_the_json(on: On) -> None:
    code, out, _ = on(CPU_ONLY, "--require", "cuda", "--json")
    assert (code, json.loads(out)["device"]) == (3, "cpu")


def test_the_environment_is_named(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_DEVICE", "cuda:7")
    code, _, err = on(CUDA)
    assert code == 3
    assert "HOTLOOP_DEVICE asks for cuda:7" in err


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_command_is_never_broken(width: int) -> None:
    commands = ["`docker run --gpus all ...`", "`sudo usermod -aG video $USER`", "`unset X`"]
    lines = wrap(f"start {commands[0]} or else, with many words, {commands[1]}, then {commands[2]}", width, "  ")
    for command in commands:
        assert any(command in line for line in lines), command
    assert all(len(line) <= width or "`" in line for line in lines)
    assert all(line.startswith("  ") for line in lines)


def test_the_real_machine(run: Run) -> None:
    code, out, _ = run("--device", "cpu", "--json")
    assert (code, json.loads(out)["device"]) == (0, "cpu")


@pytest.mark.gpu
def test_the_real_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTLOOP_DEVICE", raising=False)
    data = json.loads(run("--json").out)
    assert data["device"].startswith("cuda:")
    assert data["name"] == torch.cuda.get_device_name(data["device"])
    gpu = data["machine"]["gpus"][torch.device(data["device"]).index]
    assert gpu["free"] > 0
    assert tuple(gpu["capability"]) == torch.cuda.get_device_capability(data["device"])
    assert data["machine"]["driver"]
    assert run("--require", "cuda").code == 0

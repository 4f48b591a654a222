import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")

from hotloop import __version__
from hotloop.cli import main
from hotloop.device.facts import Cpu, InstalledGpu, MachineFacts, VisibleGpu
from hotloop.device.summary import DeviceSummary
from hotloop.printing.text import wrap

from ..warm import HOTLOOP, Warm

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


class Terminal:
    """Runs `hotloop` on a made-up machine, and holds what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        monkeypatch.delenv("HOTLOOP_DEVICE", raising=False)
        for name in ("HOTLOOP_DEBUG", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        self.width(80)

    def width(self, columns: int) -> None:
        self.monkeypatch.setenv("COLUMNS", str(columns))

    def run(self, facts: MachineFacts, *arguments: str) -> int:
        self.monkeypatch.setattr("hotloop.device.probe", lambda: facts)
        self.monkeypatch.setattr(sys, "argv", ["hotloop", "device", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        self.out, self.err = self.capsys.readouterr()
        return ended.value.code or 0


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


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
                "yes / yes / yes",
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
def test_the_panel(terminal: Terminal, facts: MachineFacts, words: list[str], width: int) -> None:
    terminal.width(width)
    assert terminal.run(facts) == 0
    for word in words:
        assert word in terminal.out
    assert max(map(len, terminal.out.splitlines())) <= width
    assert terminal.err == ""


def test_a_cause_is_told_once(terminal: Terminal) -> None:
    terminal.run(CPU_ONLY)
    assert terminal.out.count("this machine has no NVIDIA GPU") == 1


def test_foreign_strings_are_shown_and_not_obeyed(terminal: Terminal) -> None:
    name = "[red]evil[/red] [/] \x1b[2J"
    assert terminal.run(replace(CUDA, gpus=(replace(GPU, name=name),), driver="[bold")) == 0
    assert "[red]evil[/red] [/] \\x1b[2J" in terminal.out
    assert "[bold" in terminal.out
    assert "\x1b" not in terminal.out


@pytest.mark.parametrize("facts", [CUDA, SEVERAL, NO_NODES, CPU_ONLY, MachineFacts()])
def test_json_is_one_object_with_the_same_content(terminal: Terminal, facts: MachineFacts) -> None:
    assert terminal.run(facts, "--json") == 0
    data = json.loads(terminal.out)
    assert data["hotloop"] == __version__
    seen = DeviceSummary.from_json(data)
    assert seen.to_json() == {**data, "causes": tuple(data["causes"]), "gpus": tuple(data["gpus"])}
    assert set(data) >= {"device", "name", "precision", "reason", "causes", "memory", "capability", "driver", "cuda"}
    assert set(data) >= {"cudnn", "tf32", "bf16", "fp16", "gpus", "cpu", "torch", "python", "platform", "hotloop"}
    assert len(data["gpus"]) == len(facts.gpus)


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
    terminal: Terminal, facts: MachineFacts, arguments: list[str], code: int, words: list[str]
) -> None:
    assert terminal.run(facts, *arguments) == code
    assert bool(terminal.err) is bool(code)
    for word in words:
        assert word in terminal.err
    assert "Traceback" not in terminal.err


def test_require_still_prints_the_json(terminal: Terminal) -> None:
    assert terminal.run(CPU_ONLY, "--require", "cuda", "--json") == 3
    assert json.loads(terminal.out)["device"] == "cpu"


def test_the_environment_is_named(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_DEVICE", "cuda:7")
    assert terminal.run(CUDA) == 3
    assert "HOTLOOP_DEVICE asks for cuda:7" in terminal.err


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_command_is_never_broken(width: int) -> None:
    commands = ["`docker run --gpus all ...`", "`sudo usermod -aG video $USER`", "`unset X`"]
    lines = wrap(f"start {commands[0]} or else, with many words, {commands[1]}, then {commands[2]}", width, "  ")
    for command in commands:
        assert any(command in line for line in lines), command
    assert all(len(line) <= width or "`" in line for line in lines)
    assert all(line.startswith("  ") for line in lines)


def hotloop(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("HOTLOOP_DEVICE", "FORCE_COLOR")} | environ
    command = [sys.executable, "-X", "importtime", "-m", "hotloop", "device", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_help_teaches_and_does_not_import_torch() -> None:
    done = hotloop("--help", COLUMNS="80")
    assert done.returncode == 0
    assert "hotloop device --require cuda" in done.stdout
    assert "typer" in imported(done)
    assert "torch" not in imported(done)


def test_the_real_machine(warm: Warm, tmp_path: Path) -> None:
    done = warm.run(*HOTLOOP, "device", "--device", "cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["device"] == "cpu"


@pytest.mark.gpu
def test_the_real_gpu() -> None:
    import torch

    data = json.loads(hotloop("--json").stdout)
    assert data["device"].startswith("cuda:")
    assert data["name"] == torch.cuda.get_device_name(data["device"])
    assert data["memory"]["free"] > 0
    assert data["capability"] == "{}.{}".format(*torch.cuda.get_device_capability(data["device"]))
    assert data["driver"]
    assert hotloop("--require", "cuda").returncode == 0

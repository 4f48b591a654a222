import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotloop.device import pick
from hotloop.device.backend import precision_for
from hotloop.device.facts import MachineFacts
from hotloop.device.picking import available, pick_from
from hotloop.errors import BadArgument, DeviceUnavailable, HotloopError

from .machines import BARE, BLIND, GIB, HEALTHY, LAPTOP, MAC, gpu

INTEL = replace(LAPTOP, xpu_built=True, accelerators=(("xpu:0", "Intel Arc A770"), ("xpu:1", "Intel Arc B580")))
PAIR = replace(HEALTHY, gpus=(gpu(0, 12 * GIB), gpu(1, 70 * GIB)))
OLD_FIRST = replace(HEALTHY, gpus=(gpu(0, 79 * GIB, (6, 1), "GTX 1080"), gpu(1, 3 * GIB)))


@pytest.mark.parametrize(
    ("facts", "device", "precision", "words"),
    [
        (HEALTHY, "cuda:0", "bf16", ["NVIDIA H200", "130.0 GiB of 139.0 GiB", "9.0", "bf16"]),
        (PAIR, "cuda:1", "bf16", ["most free memory of 2 usable GPUs", "70.0 GiB", "cuda:0 has 12.0 GiB"]),
        (replace(HEALTHY, mps_available=True, accelerators=(("xpu:0", "Arc"),)), "cuda:0", "bf16", ["H200"]),
        (replace(MAC, accelerators=(("xpu:0", "Arc"),)), "mps:0", "fp32", ["GPU of this Mac"]),
        (INTEL, "xpu:0", "fp32", ["Intel Arc A770"]),
        (LAPTOP, "cpu", "fp32", ["No GPU can be used", "no NVIDIA GPU", "fix: the CPU is fine"]),
        (replace(MAC, mps_available=False), "cpu", "fp32", ["no Metal GPU", "virtual machine"]),
        (replace(BLIND, visible="-1"), "cpu", "fp32", ["CUDA_VISIBLE_DEVICES", "unset"]),
    ],
)
def test_the_best_device_is_chosen_with_its_reason(
    facts: MachineFacts, device: str, precision: str, words: list[str]
) -> None:
    choice = pick_from(facts)
    assert (str(choice.device), choice.precision) == (device, precision)
    for word in words:
        assert word in choice.reason
    assert str(choice) == f"{device} in {precision}: {choice.reason}"


@pytest.mark.parametrize(
    ("free", "index"),
    [
        ((1, 3, 2), 1),
        ((5, 5, 5), 0),
        ((None, 1, None), 1),
        ((None, None, None), 0),
        ((None, 0, None), 1),
    ],
)
def test_of_several_gpus_the_one_with_the_most_free_memory(free: tuple[int | None, ...], index: int) -> None:
    gpus = tuple(gpu(number, bytes_) for number, bytes_ in enumerate(free))
    choice = pick_from(replace(HEALTHY, gpus=gpus))
    assert choice.device == torch.device("cuda", index)
    assert pick_from(replace(HEALTHY, gpus=gpus), "cuda").device == choice.device
    if set(free) == {None}:
        assert "unknown" in choice.reason


def test_unknown_memory_is_not_told_as_a_number() -> None:
    reason = pick_from(replace(HEALTHY, gpus=(replace(gpu(0, None), total=None),))).reason
    assert "an unknown amount of memory" in reason


def test_a_gpu_that_the_build_does_not_cover_is_left_out_and_explained() -> None:
    choice = pick_from(OLD_FIRST)
    assert choice.device == torch.device("cuda", 1)
    assert [cause.code for cause in choice.causes] == ["unsupported-arch"]
    assert "GTX 1080" in choice.causes[0].what


def test_an_nvidia_gpu_beside_an_intel_one_is_worth_a_word() -> None:
    assert pick_from(INTEL).causes == ()
    both = replace(INTEL, hardware=HEALTHY.hardware)
    assert pick_from(both).causes[0].code == "cpu-build"


@pytest.mark.parametrize(
    ("want", "facts", "device", "reason"),
    [
        ("cuda", PAIR, "cuda:1", "You asked for cuda. cuda:1 (NVIDIA A100) has the most"),
        ("cuda:0", PAIR, "cuda:0", "You asked for cuda:0: NVIDIA A100 with 12.0 GiB of 80.0 GiB free."),
        (" CUDA:1 ", PAIR, "cuda:1", "You asked for cuda:1"),
        (torch.device("cuda"), PAIR, "cuda:1", "You asked for cuda."),
        (torch.device("cuda", 0), PAIR, "cuda:0", "You asked for cuda:0"),
        ("cuda:1", OLD_FIRST, "cuda:1", "You asked for cuda:1"),
        ("cpu", HEALTHY, "cpu", "You asked for cpu."),
        ("cpu:0", HEALTHY, "cpu", "You asked for cpu."),
        (torch.device("cpu"), HEALTHY, "cpu", "You asked for cpu."),
        ("mps", MAC, "mps:0", "You asked for mps."),
        ("xpu", INTEL, "xpu:0", "You asked for xpu: Intel Arc A770."),
        ("xpu:1", INTEL, "xpu:1", "You asked for xpu:1: Intel Arc B580."),
        ("auto", PAIR, "cuda:1", "cuda:1 (NVIDIA A100) has the most"),
    ],
)
def test_a_request_is_met(want: str | torch.device, facts: MachineFacts, device: str, reason: str) -> None:
    choice = pick_from(facts, want)
    assert str(choice.device) == device
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize(
    ("want", "facts", "words"),
    [
        ("cuda:7", HEALTHY, ["cuda:7", "torch sees 1 GPU", "cuda:0 (NVIDIA H200), cpu"]),
        ("cuda:1", replace(HEALTHY, visible="2"), ["CUDA_VISIBLE_DEVICES='2'", "renumbers"]),
        ("cuda", LAPTOP, ["this machine has no NVIDIA GPU", "choose one of what is here: cpu"]),
        ("cuda:0", replace(BLIND, visible=""), ["hides every GPU", "unset CUDA_VISIBLE_DEVICES"]),
        ("cuda:0", OLD_FIRST, ["GTX 1080", "6.1", "an older build", "cuda:1 (NVIDIA A100), cpu"]),
        ("cuda", replace(OLD_FIRST, gpus=OLD_FIRST.gpus[:1]), ["GTX 1080", "what is here: cpu"]),
        ("mps", HEALTHY, ["this is Linux", "cuda:0 (NVIDIA H200), cpu"]),
        ("mps", replace(MAC, mps_available=False), ["no Metal GPU"]),
        ("mps:1", MAC, ["one GPU", "mps, cpu"]),
        ("xpu", HEALTHY, ["without support for Intel"]),
        ("xpu:2", INTEL, ["2 Intel GPUs", "xpu:1 (Intel Arc B580)"]),
        ("cpu:3", HEALTHY, ["one CPU"]),
        (torch.device("cuda", 9), HEALTHY, ["cuda:9"]),
    ],
)
def test_a_device_that_is_not_here(want: str | torch.device, facts: MachineFacts, words: list[str]) -> None:
    with pytest.raises(DeviceUnavailable) as error:
        pick_from(facts, want)
    for word in ["you asked for", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("want", "words"),
    [
        ("gpu", ["did you mean 'cuda'?"]),
        ("GPU:0", ["did you mean 'cuda'?"]),
        ("nvidia", ["did you mean 'cuda'?"]),
        ("cudaa", ["did you mean 'cuda'?"]),
        ("mp", ["did you mean 'mps'?"]),
        ("atuo", ["did you mean 'auto'?"]),
        (0, ["did you mean 'cuda'?"]),
        ("cuda:-1", ["counted from 0"]),
        ("cuda:", ["counted from 0"]),
        ("cuda:1.5", ["counted from 0"]),
        ("cuda:99999999999999999999", ["counted from 0"]),
        ("cuda:٣", ["counted from 0"]),
        ("meta", ["no data"]),
        (torch.device("meta"), ["no data"]),
        (torch.device("hpu"), ["not the name of a device"]),
        ("", ["''"]),
        ("   ", ["not the name of a device"]),
        ("\x1b[2J", ["\\x1b[2J"]),
        ("a b c", ["not the name of a device"]),
        (1.5, ["not the name of a device"]),
    ],
)
def test_what_is_not_a_device_at_all(want: Any, words: list[str]) -> None:
    with pytest.raises(BadArgument) as error:
        pick_from(HEALTHY, want)
    for word in ["you asked for", "cuda:0 (NVIDIA H200), cpu, auto", *words]:
        assert word in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "want", "device"),
    [
        ("cpu", None, "cpu"),
        ("cuda:0", None, "cuda:0"),
        ("auto", None, "cuda:1"),
        ("", None, "cuda:1"),  # as good as unset
        ("cpu", "cuda:0", "cuda:0"),
        ("cpu", "auto", "cuda:1"),
        ("nonsense", "cuda:0", "cuda:0"),
    ],
)
def test_the_argument_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, want: str | None, device: str
) -> None:
    monkeypatch.setenv("HOTLOOP_DEVICE", value)
    choice = pick_from(PAIR, want)
    assert str(choice.device) == device
    if want is None and value in ("cpu", "cuda:0"):
        assert choice.reason.startswith(f"HOTLOOP_DEVICE asks for {value}")


@pytest.mark.parametrize(("value", "error"), [("cuda:5", DeviceUnavailable), ("gpu", BadArgument)])
def test_a_wrong_request_names_the_variable_it_came_from(
    monkeypatch: pytest.MonkeyPatch, value: str, error: type[HotloopError]
) -> None:
    monkeypatch.setenv("HOTLOOP_DEVICE", value)
    with pytest.raises(error, match="HOTLOOP_DEVICE asks for"):
        pick_from(PAIR)


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        ((6, 1), "fp32"),
        ((7, 0), "fp16"),
        ((8, 0), "bf16"),
        ((12, 0), "bf16"),
    ],
)
def test_precision_by_compute_capability(capability: tuple[int, int], precision: str) -> None:
    assert precision_for(capability) == precision
    card = gpu(0, GIB, capability)
    choice = pick_from(replace(HEALTHY, arch_list=(), gpus=(card,)))
    assert choice.precision == precision
    assert precision in choice.reason


def test_what_is_here() -> None:
    everything = replace(OLD_FIRST, mps_available=True, accelerators=(("xpu:0", "Arc"),))
    assert available(everything) == ["cuda:1 (NVIDIA A100)", "mps", "xpu:0 (Arc)", "cpu"]


def test_asking_for_the_cpu_looks_at_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> MachineFacts:
        raise AssertionError("probed")

    monkeypatch.setattr("hotloop.device.probe.probe", fail)
    choice = pick("cpu")
    assert choice.device == torch.device("cpu")
    assert choice.name


def test_the_records_and_the_causes_need_no_torch() -> None:
    """The package imports torch; these modules must not be the reason."""
    for name in ("facts", "causes", "machine"):
        module = sys.modules[f"hotloop.device.{name}"]
        assert not hasattr(module, "torch")


def test_what_was_picked_before_keeps_its_reason() -> None:
    assert pick(chosen := pick_from(BARE)) is chosen
    assert "asked" not in chosen.reason

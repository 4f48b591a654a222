import json
from dataclasses import fields, replace
from typing import get_type_hints

import pytest

pytest.importorskip("hypothesis")  # the machines that only run the GPU tests may not have it

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotloop.device import Choice
from hotloop.device.causes import why_no_cuda, why_no_mps, why_none
from hotloop.device.facts import Cpu, InstalledGpu, MachineFacts, VisibleGpu
from hotloop.device.picking import pick_from

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared

words = st.text(max_size=12)
maybe_words = st.none() | words
counts = st.none() | st.integers(0, 2**40)
archs = st.from_regex(r"(sm|compute)_([3-9]|1[0-3])[0-9][af]?", fullmatch=True)
capabilities = st.tuples(st.integers(3, 13), st.integers(0, 9))
versions = st.none() | words | st.from_regex(r"\d{1,3}\.\d{1,3}(\.\d{2})?", fullmatch=True)
nodes = st.sampled_from(["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"])
visible = st.none() | words | st.from_regex(r"-?\d(,\d)*", fullmatch=True)


def _numbered(names: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"xpu:{index}", name) for index, name in enumerate(names))


@st.composite
def machines(draw: st.DrawFn) -> MachineFacts:
    known = {
        "system": st.sampled_from(["Linux", "Windows", "Darwin"]),
        "variant": st.sampled_from([None, "wsl", "jetson"]),
        "macos": st.none() | capabilities,
        "torch_cuda": versions,
        "arch_list": st.lists(archs | words, max_size=6).map(tuple),
        "driver": versions,
        "driver_cuda": st.none() | capabilities,
        "visible": visible,
        "hardware": st.none() | st.lists(st.builds(InstalledGpu, words, maybe_words), max_size=3).map(tuple),
        "nodes": st.lists(st.tuples(nodes, st.sampled_from(["ok", "denied"])), max_size=3).map(tuple),
        "accelerators": st.lists(words, max_size=2).map(_numbered),
        "cpu": st.builds(Cpu, maybe_words, counts, counts, counts, counts, counts),
    }
    by_type = {bool: st.booleans(), str | None: maybe_words}
    hints = get_type_hints(MachineFacts)
    drawn = {
        field.name: draw(known[field.name] if field.name in known else by_type[hints[field.name]])
        for field in fields(MachineFacts)
        if field.name != "gpus"
    }
    seen = draw(st.lists(st.tuples(words, capabilities, counts, counts, maybe_words), max_size=4))
    return MachineFacts(**drawn, gpus=tuple(VisibleGpu(index, *rest) for index, rest in enumerate(seen)))


@patient
@given(machines())
def test_any_machine_has_a_device_and_a_reason(facts: MachineFacts) -> None:
    choice = pick_from(facts)
    assert choice.reason.strip()
    assert choice.precision in ("fp32", "bf16", "fp16")
    assert all(cause.what and cause.fix for cause in choice.causes)


@patient
@given(machines())
def test_a_gpu_that_the_build_does_not_cover_is_never_chosen(facts: MachineFacts) -> None:
    device = pick_from(facts).device
    if device.type == "cuda":
        chosen = facts.gpus[device.index]
        assert facts.covers(chosen)
        assert (chosen.free or 0) == max(gpu.free or 0 for gpu in facts.usable)
    else:
        assert not facts.usable


@patient
@given(machines())
def test_there_is_a_cause_exactly_where_no_cuda_gpu_can_be_used(facts: MachineFacts) -> None:
    assert bool(why_no_cuda(facts)) is not bool(facts.usable)
    assert (why_no_mps(facts) is None) is facts.mps_available
    assert (why_none(facts, "xpu", "Intel GPU") is None) is bool(facts.accelerators)


@patient
@given(machines())
def test_every_record_comes_back_from_json(facts: MachineFacts) -> None:
    choice = pick_from(facts)
    for record in (facts, choice):
        kind: type[MachineFacts | Choice] = type(record)
        assert kind.from_json(json.loads(json.dumps(record.to_json()))) == record


@patient
@given(machines())
def test_no_foreign_string_can_steer_the_terminal(facts: MachineFacts) -> None:
    evil = "\x1b[2J"
    facts = replace(
        facts,
        gpus=tuple(replace(gpu, name=evil, gfx=evil) for gpu in facts.gpus),
        hardware=None if facts.hardware is None else tuple(replace(card, name=evil) for card in facts.hardware),
        torch_version=evil,
        cuda_error=evil,
        driver=evil,
        visible=evil,
        accelerators=tuple((device, evil) for device, _ in facts.accelerators),
    )
    for told in (pick_from(facts), *why_no_cuda(facts)):
        assert "\x1b" not in str(told)

"""The calibration runs where it can, and finds a made-up card again from its measurements."""

import gzip
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from calibration_fit import Sample
from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.cost import seconds_of
from hotloop.apps.simulate.products import Product
from hotloop.apps.simulate.table import ArchitectureTable, HostCost, Link, default_table
from hotloop.apps.simulate.work import WorkPart
from hotloop.device.machine import cpu_name

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "calibrate_gpu.py"
H200 = card("h200")


@pytest.fixture(scope="module")
def calibrate() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARK.parent)
        patch.setattr("calibration_fit.TILES", (1024.0, 4096.0))  # `test_fit.py` looks among all of them
        yield importlib.import_module(BENCHMARK.stem)


def test_it_runs_on_a_cpu_and_more_is_added_to_what_was_measured_before(calibrate, tmp_path, monkeypatch):
    table, raw = tmp_path / "time.json", tmp_path / "raw.json.gz"
    command = [str(BENCHMARK), "--device", "cpu", "--quick", "--table", str(table), "--raw", str(raw)]

    def measured(*options: str) -> dict[str, float]:
        monkeypatch.setattr(sys, "argv", [*command, *options])
        calibrate.main()
        return {row["label"]: row["seconds"] for row in json.loads(gzip.decompress(raw.read_bytes()))["samples"]}

    first = measured("--only", "layer", "add")
    assert all(seconds > 0 for seconds in first.values())
    written = ArchitectureTable.from_json(json.loads(table.read_text()))
    assert (written.card, written.torch) == ("t4", torch.__version__)
    host = written.host
    assert cpu_name() in host.name
    assert min(host.backward, host.optimizer, host.launch, host.copy) > 0
    assert 0 < host.other < host.forward
    both = measured("--add", "--only", "layer", "softmax")
    assert both.items() > first.items()
    assert {label.split()[0] for label in both} == {"layer", "add", "softmax"}


def test_the_table_of_a_cpu_does_not_get_into_the_package(calibrate, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibrate_gpu.py", "--device", "cpu", "--quick"])
    with pytest.raises(SystemExit):
        calibrate.main()
    assert "--table" in capsys.readouterr().err


def test_a_card_is_found_again_from_its_measurements(calibrate, capsys):
    products = [Product(1, m, n, k) for m in (128, 640, 2560, 8192) for n in (128, 2560) for k in (640, 4096)]
    parts = [WorkPart("gemm", 2.0 * (p.rows + p.columns) * p.inner, p.flops, "bf16", product=p) for p in products]
    parts += [WorkPart("pointwise", bytes=float(2**power)) for power in range(12, 32, 2)]
    parts += [WorkPart("norm", bytes=1e6), WorkPart("norm", bytes=1e7)]
    truth = default_table()
    samples = [Sample(part, seconds_of(part, H200, truth)) for part in parts]
    table = calibrate.build(samples, H200, link=Link(), host=HostCost(), floor=truth.floor)
    assert (table.card, table.architecture) == ("h200", "hopper")
    assert "norm" not in table.curves  # of too few measurements nothing is concluded
    for sample in samples:
        assert seconds_of(sample.part, H200, table) == pytest.approx(sample.seconds, rel=0.1)
    assert table.curves["gemm/fp16"] == table.curves["gemm/bf16"]  # what was measured in one half serves the other
    assert "gemm/bf16" in capsys.readouterr().out


def test_the_cases_take_turns_so_that_a_short_run_has_seen_all_families(calibrate):
    first = [case.label.split()[0] for case in calibrate.cases(torch.device("cpu"), quick=True)[:8]]
    assert len(set(first)) == 8


def test_a_case_that_fails_does_not_end_the_others(calibrate):
    def broken(_: torch.device) -> None:
        raise RuntimeError("no such kernel\nand more")

    cases = [calibrate.Case("broken", broken), calibrate.Case("late", broken)]
    found, troubles = calibrate.measure_all(cases, H200, torch.device("cpu"), until=float("inf"))
    assert found == []
    assert troubles[0] == "broken: RuntimeError: no such kernel"
    assert len(troubles) == 2
    _, troubles = calibrate.measure_all(cases, H200, torch.device("cpu"), until=0.0)
    assert troubles == ["time was up after 0 of 2 cases"]


def test_what_was_measured_long_ago_is_seen_as_it_is_today(calibrate):
    known = {case.label: case for case in calibrate.cases(calibrate.META, quick=False)}
    for label, family, precision, traits in [
        ("layer torch.float32 (256, 640) backward=False", "norm", "fp32", (256, 640)),
        (
            "conv weight bf16 (64, 160, 28, 320, 1, 2) last=True",
            "conv-backward-weight",
            "bf16",
            (12544, 160, 320, 1, 2, 32),
        ),
        ("attention bf16 (8, 10, 256, 64, True) backward=True", "attention-backward", "bf16", (80, 256, 256, 64, 2, 1)),
        ("attention fp32 (8, 10, 256, 64, False) backward=False", "attention", "fp32", (80, 256, 256, 64, 1, 1)),
    ]:
        old = {"family": family, "bytes": 1.0, "flops": 0.0, "precision": precision, "kernels": 1, "product": None}
        part = calibrate.part_anew({"label": label, "part": {**old, "layout": ""}}, known[label], H200)
        assert (part.family, part.traits) == (family, traits)


@pytest.mark.gpu
def test_on_a_gpu_the_time_of_a_kernel_is_not_the_hosts(calibrate):
    device = torch.device("cuda")
    small = torch.zeros(1, device=device)
    large = torch.zeros(2**28, device=device)
    assert calibrate.seconds_of(lambda: small.add_(1.0), device) < 20e-6
    bandwidth = 2 * large.nbytes / calibrate.seconds_of(lambda: large.add_(1.0), device)
    assert bandwidth > 1e11


@pytest.mark.gpu
def test_on_a_gpu_most_cases_can_be_measured(calibrate):
    precision, allowed = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    device = torch.device("cuda")
    try:
        cases = calibrate.cases(device, quick=True)
        found, troubles = calibrate.measure_all(cases, H200, device, until=float("inf"))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allowed
    assert len(found) >= 0.8 * len(cases), troubles

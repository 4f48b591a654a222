"""The demo: it learns, it is the same each time, and it writes all of its folder or nothing."""

import json
import re
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from hotloop import Report
from hotloop.demo import ARMS, Settings, Waves, run_demo, spirals
from hotloop.errors import BadArgument, DeviceUnavailable, OutputError

FILES = ["loss.png", "report.html", "report.json", "spirals.png"]
SMALL = {"device": "cpu", "epochs": 2, "points": 300, "seed": 1, "progress": False}


def small(out: Path, **changed: object) -> tuple[Report, Path]:
    return run_demo(out, **{**SMALL, **changed})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """One small run that several tests look at."""
    return small(tmp_path_factory.mktemp("demo") / "run")


def test_the_folder_holds_every_file(done: tuple[Report, Path]) -> None:
    _, folder = done
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert list(folder.parent.iterdir()) == [folder]


def test_the_pictures_are_pictures(done: tuple[Report, Path]) -> None:
    _, folder = done
    for name in ("loss.png", "spirals.png"):
        with Image.open(BytesIO((folder / name).read_bytes())) as image:
            image.load()
            assert image.width >= 1000


def test_the_json_is_the_report_and_the_settings(done: tuple[Report, Path]) -> None:
    report, folder = done
    data = json.loads((folder / "report.json").read_text())
    assert Report.from_json(data) == report
    assert data["demo"] == {
        "epochs": 2,
        "points": 300,
        "seed": 1,
        "command": "hotloop demo --device cpu --epochs 2 --points 300 --seed 1",
    }


def test_the_page_shows_each_stage_and_the_command(done: tuple[Report, Path]) -> None:
    html = (done[1] / "report.html").read_text(encoding="utf-8")
    assert html.count("<figcaption>") == 2
    assert "hotloop demo --device cpu --epochs 2 --points 300 --seed 1" in html
    assert not re.search(r"https?://", html)


def test_the_report_has_every_epoch_with_its_accuracy(done: tuple[Report, Path]) -> None:
    report, _ = done
    assert [epoch.number for epoch in report.epochs] == [1, 2]
    assert all(0 <= epoch.metrics["accuracy"] <= 1 for epoch in report.epochs)
    assert not report.interrupted


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    done: tuple[Report, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.demo._Demo.write", lambda *args: None)  # the pictures take longest
    again, _ = small(tmp_path / "again")
    other, _ = small(tmp_path / "other", seed=2)
    assert again.curve == done[0].curve
    assert other.curve != done[0].curve


def test_it_leaves_the_random_state_of_torch_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    small(tmp_path / "run", epochs=1)
    assert torch.equal(before, torch.get_rng_state())


def test_it_learns(tmp_path: Path) -> None:
    report, _ = small(tmp_path / "run", epochs=8, points=6000, seed=0)
    assert report.epochs[-1].metrics["accuracy"] > 0.97


def test_one_batch_in_one_epoch_is_enough(tmp_path: Path) -> None:
    report, _ = small(tmp_path / "run", epochs=1, points=100)
    assert report.steps == 1


def test_the_device_is_told_before_the_folder_is_made(tmp_path: Path) -> None:
    heard = []
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        small(tmp_path / "file", tell=lambda choice: heard.append(choice.reason))
    assert heard == ["You asked for cpu."]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"epochs": 0}, "0 epochs"),
        ({"epochs": -3}, "-3 epochs"),
        ({"points": 0}, "0 points"),
        ({"points": -5}, "-5 points"),
        ({"points": 99}, "99 points"),
        ({"points": 10**15}, "points"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**63}, "seed"),
        ({"device": "warp"}, "warp"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_written(
    tmp_path: Path, changed: dict[str, object], what: str
) -> None:
    with pytest.raises(BadArgument, match=what) as caught:
        small(tmp_path / "run", **changed)
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_here_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable):
        small(tmp_path / "run", device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr("hotloop.demo.strip", broken)
    with pytest.raises(MemoryError):
        small(tmp_path / "run", epochs=1, points=100)
    assert list(tmp_path.iterdir()) == []


def test_the_command_of_the_settings_is_one_that_a_shell_takes() -> None:
    assert Settings(1, 100, 7).command("cuda:1") == "hotloop demo --device cuda:1 --epochs 1 --points 100 --seed 7"


def test_spirals_are_in_the_picture_and_their_arms_are_even() -> None:
    places, arms = spirals(1000, torch.Generator().manual_seed(0))
    assert float(places.norm(dim=1).max()) < 1.1
    assert torch.bincount(arms).tolist() == [200] * ARMS


def test_the_network_starts_from_its_generator_alone() -> None:
    first, second = (Waves(torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.gpu
def test_it_learns_on_a_gpu(tmp_path: Path) -> None:
    report, _ = small(tmp_path / "run", device="cuda", epochs=12, points=6000)
    assert report.device.startswith("cuda")
    assert report.epochs[-1].metrics["accuracy"] > 0.97
    assert report.peak_memory

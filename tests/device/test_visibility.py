import pytest

from hotloop.device.causes import why_hidden
from hotloop.device.facts import InstalledGpu

TWO = (InstalledGpu("NVIDIA T4", "GPU-aaaa-1"), InstalledGpu("NVIDIA T4", "GPU-bbbb-2"))
ON_BUS = (InstalledGpu("NVIDIA GPU 0000:01:00.0"),)  # the bus gives no UUID


@pytest.mark.parametrize(
    ("visible", "cards", "hidden"),
    [
        ("", TWO, True),
        ("  ", TWO, True),
        ("-1", TWO, True),
        ("-1,0", TWO, True),
        ("0", TWO, False),
        ("1,0", TWO, False),
        (" 1 , 0 ", TWO, False),
        ("2", TWO, True),
        ("0,2", TWO, False),  # cut after the first
        ("2,0", TWO, True),  # cut before anything
        ("0,0", TWO, True),
        ("0,9,0", TWO, False),  # cut before the repetition
        ("1st", TWO, False),
        ("all", TWO, True),
        ("none", TWO, True),
        ("GPU-bbbb", TWO, False),
        ("GPU-cccc", TWO, True),
        ("GPU-cccc", ON_BUS, False),
        ("GPU-cccc", None, False),
        ("MIG-1/2/3", TWO, False),
        ("7", None, False),  # nobody knows how many there are
        ("1", ON_BUS, True),
        ("-1", None, True),
    ],
)
def test_what_cuda_visible_devices_leaves(visible: str, cards: tuple[InstalledGpu, ...] | None, hidden: bool) -> None:
    assert (why_hidden(visible, cards) is not None) is hidden

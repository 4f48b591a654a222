from dataclasses import replace

import pytest

from hotloop.device.facts import MachineFacts, VisibleGpu, runs_on

from .machines import HEALTHY


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90", (8, 0), False),
        ("compute_80", (8, 0), True),
        ("compute_80", (12, 0), True),
        ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("compute_90a", (10, 0), False),
        ("compute_100f", (12, 0), False),
        ("sm_120", (12, 0), True),
        ("gfx90a", (9, 0), False),
        ("", (9, 0), False),
    ],
)
def test_code_runs_within_a_major_version_and_ptx_on_anything_newer(
    arch: str, capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(arch, capability) is runs


@pytest.mark.parametrize(
    ("archs", "gfx", "usable"),
    [(("gfx90a", "gfx942"), "gfx942", True), (("gfx90a",), "gfx1030", False), (("gfx90a",), None, True)],
)
def test_rocm_builds_are_judged_by_the_name_of_the_architecture(
    archs: tuple[str, ...], gfx: str | None, usable: bool
) -> None:
    amd = VisibleGpu(0, "AMD Instinct", (9, 4), gfx=gfx)
    facts = MachineFacts(torch_hip="6.4", arch_list=archs, gpus=(amd,))
    assert facts.usable == ((amd,) if usable else ())


def test_a_build_that_does_not_tell_is_trusted() -> None:
    assert replace(HEALTHY, arch_list=()).usable == HEALTHY.gpus

"""`user_site` and `user_frames` step over torch and hotloop."""

import sys
from pathlib import Path

import torch

from hotloop.placement.sites import Site, site_of, user_frames, user_site


def test_the_line_of_the_caller() -> None:
    here = sys._getframe().f_lineno + 1
    site = user_site()
    assert site == Site(__file__, here)
    assert site.code == "site = user_site()"
    assert str(site).startswith(str(Path(__file__).relative_to(Path.cwd())))


def test_frames_of_torch_are_stepped_over() -> None:
    seen: list[Site] = []

    class Spy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(site_of(f) for f in user_frames())
            return x

    torch.nn.Sequential(Spy())(torch.ones(1))
    assert [site.file for site in seen[:2]] == [__file__, __file__]
    assert not any("/torch/" in site.file for site in seen)


def test_code_without_a_file_has_a_place_but_no_line() -> None:
    assert str(Site("<stdin>", 3)) == "<stdin>:3"

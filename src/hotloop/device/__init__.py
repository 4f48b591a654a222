"""Which device to train on, and why: `probe` reads the machine, `pick` chooses, `why_no_cuda` explains."""

from hotloop.device.causes import Cause, why_no_cuda
from hotloop.device.choice import Choice, pick
from hotloop.device.facts import Facts, Gpu
from hotloop.device.probe import probe

__all__ = ["Cause", "Choice", "Facts", "Gpu", "pick", "probe", "why_no_cuda"]

"""Which device to train on, and why: `probe` reads the machine, `pick` chooses, `why_no_cuda` explains."""

from hotloop.device.causes import Cause, why_no_cuda
from hotloop.device.choice import Choice, as_device, device_error, pick
from hotloop.device.facts import MachineFacts, VisibleGpu
from hotloop.device.probe import probe

__all__ = ["Cause", "Choice", "MachineFacts", "VisibleGpu", "as_device", "device_error", "pick", "probe", "why_no_cuda"]

"""Which device to train on, and why: `pick` chooses by the facts that `probe.probe` reads of the machine."""

from hotloop.device.choice import Choice, as_device, device_error, pick

__all__ = ["Choice", "as_device", "device_error", "pick"]

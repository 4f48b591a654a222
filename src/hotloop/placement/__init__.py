"""Putting tensors where they belong, and explaining when one is not there."""

from hotloop.placement.moving import move, pin, to_numpy, upload
from hotloop.placement.placing import place

__all__ = ["move", "pin", "place", "to_numpy", "upload"]

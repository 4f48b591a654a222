"""Putting tensors where they belong, and explaining when one is not there."""

from hotloop.placement.golden import golden_rule
from hotloop.placement.moving import move, tensors_in, to_numpy
from hotloop.placement.placing import place

__all__ = ["golden_rule", "move", "place", "tensors_in", "to_numpy"]

"""`Loop` carries out a `Plan`: one step, an epoch, an evaluation."""

from hotloop.training.loop import Loop

__all__ = ["Loop"]

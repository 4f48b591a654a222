"""`Loop` carries out a `Plan`: one step, an epoch, an evaluation."""

from hotloop.loop.loop import Loop

__all__ = ["Loop"]

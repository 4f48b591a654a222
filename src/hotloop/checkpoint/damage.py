"""What can be wrong with a checkpoint."""

from hotloop.errors import HotloopError


class DamagedCheckpoint(HotloopError, ValueError):
    """A checkpoint that is not, or no longer, what was saved. `what` says in which way."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be saved or used; the one before it stands."""

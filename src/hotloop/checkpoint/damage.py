"""What can be wrong with a checkpoint."""

from hotloop.errors import HotloopError
from hotloop.printing.text import printable


class DamagedCheckpoint(HotloopError, ValueError):
    """A checkpoint that is not, or no longer, what was saved. `what` says in which way."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be saved or used; the one before it stands."""


def unusable(what: str) -> DamagedCheckpoint:
    """The error for a checkpoint whose contents are not what a run saves there."""
    return DamagedCheckpoint(
        f"the checkpoint cannot be used: {printable(what[:300])}",
        fix="use another checkpoint of this run, or choose another folder for a new one; nothing was changed",
    )

"""How much is tried: enough for each change, and more with HOTLOOP_TEST_RANDOM=1, as in a nightly run."""

import os

THOROUGH = bool(os.environ.get("HOTLOOP_TEST_RANDOM"))


def tries(usual: int, thorough: int) -> int:
    """How many examples, steps or moments a test takes."""
    return thorough if THOROUGH else usual

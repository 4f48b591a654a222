"""`hotloop top`: readings of the hardware, live in a terminal, as text, or as a page."""

import hotloop.printing.terminal  # noqa: F401  # before anything here imports rich

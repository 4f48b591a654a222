"""`hotloop top`: readings of the hardware, live in a terminal, as text, or as a page."""

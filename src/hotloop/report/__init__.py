"""A `Report` as people see it: a page, a table in the terminal, plots, and the folder that keeps them.

Numbers and strings only: nothing here needs torch, and matplotlib is loaded by the modules that draw.
"""

import hotloop.printing.terminal  # noqa: F401  # before anything here imports rich

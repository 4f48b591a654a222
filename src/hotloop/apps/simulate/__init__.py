"""A GPU that is not here: what a training script would do on it, found without one.

>>> with hotloop.simulate("h200") as sim:  # doctest: +SKIP
...     train()
>>> print(sim)  # doctest: +SKIP
"""

import hotloop.printing.terminal  # noqa: F401  # before anything here imports rich

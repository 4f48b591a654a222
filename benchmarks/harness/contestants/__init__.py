"""The contestants: each takes the same parts and trains them in its own way."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from harness.contestants.by_hand import careful, expert, tutorial
from harness.contestants.frameworks import accelerate, fabric, lightning, warm_up
from harness.contestants.hot import hot
from harness.contestants.hugging_face import trainer
from harness.contestants.protocol import DoesNotApply as DoesNotApply
from harness.contestants.protocol import Run as Run
from harness.contestants.protocol import Start as Start
from harness.contestants.protocol import Started as Started
from harness.contestants.protocol import timed as timed
from hotloop.errors import BadArgument

NAMES = ("tutorial", "careful", "accelerate", "fabric", "lightning", "trainer", "hotloop", "expert")


def contestants(
    names: Iterable[str] | None = None, *, experts: Path | None = None, plan_for: float = 3600
) -> dict[str, Start]:
    """The contestants of these names, by default all; the expert only where there is a folder of its loops.

    >>> list(contestants(["tutorial", "hotloop"]))
    ['tutorial', 'hotloop']
    """
    if not 0 < plan_for < float("inf"):
        raise BadArgument(f"plan for {plan_for} seconds", fix="give the length of a training, above 0")
    known: dict[str, Start] = {
        "tutorial": tutorial,
        "careful": careful,
        "accelerate": accelerate,
        "fabric": fabric,
        "lightning": lightning,
        "trainer": trainer,
        "hotloop": partial(hot, plan_for=plan_for),
    }
    if experts is not None:
        known["expert"] = partial(expert, folder=experts)
    chosen = list(known if names is None else names)
    for name in chosen:
        if name == "expert" and experts is None:
            raise BadArgument("the expert's loops are in files", fix="name their folder: --expert benchmarks/expert")
        if name not in known:
            raise BadArgument(f"there is no contestant {name!r}", fix=f"choose of: {', '.join(NAMES)}")
    warm_up(chosen)
    return {name: known[name] for name in chosen}

"""hotloop runs the PyTorch loop you already have at the speed of the hardware you have.

Names are looked up on first use, so `import hotloop` costs nothing and starts no GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hotloop.version import __version__

if TYPE_CHECKING:
    from hotloop import metrics as metrics
    from hotloop.checkpoint import read_weights as read_weights
    from hotloop.clock import measure as measure
    from hotloop.data import pad_to as pad_to
    from hotloop.data import stream as stream
    from hotloop.device import Choice as Choice
    from hotloop.device import pick as pick
    from hotloop.errors import DeviceMismatch as DeviceMismatch
    from hotloop.errors import HotloopError as HotloopError
    from hotloop.evaluation import evaluate as evaluate
    from hotloop.memory.leaks import watch_growth as watch_growth
    from hotloop.memory.release import release as release
    from hotloop.memory.usage import usage as usage
    from hotloop.monitor.watching import watch as watch
    from hotloop.placement import golden_rule as golden_rule
    from hotloop.placement import move as move
    from hotloop.placement import place as place
    from hotloop.placement import to_numpy as to_numpy
    from hotloop.plan import Plan as Plan
    from hotloop.ranks import world_size as world_size
    from hotloop.records import Report as Report
    from hotloop.rng import seed as seed
    from hotloop.simulate import _Simulate
    from hotloop.step.survive import survive_oom as survive_oom
    from hotloop.training import Loop as Loop
    from hotloop.training.hooks import Ema as Ema
    from hotloop.training.warmup import WarmupCosine as WarmupCosine
    from hotloop.training.weights import load_weights as load_weights
    from hotloop.waits import waits as waits

    simulate: _Simulate  # a package that is called

_HOMES = {
    "Choice": "device",
    "DeviceMismatch": "errors",
    "Ema": "training.hooks",
    "HotloopError": "errors",
    "Loop": "training",
    "Plan": "plan",
    "Report": "records",
    "WarmupCosine": "training.warmup",
    "evaluate": "evaluation",
    "golden_rule": "placement",
    "load_weights": "training.weights",
    "measure": "clock",
    "move": "placement",
    "pad_to": "data",
    "pick": "device",
    "place": "placement",
    "read_weights": "checkpoint",
    "release": "memory.release",
    "seed": "rng",
    "stream": "data",
    "survive_oom": "step.survive",
    "to_numpy": "placement",
    "usage": "memory.usage",
    "watch": "monitor.watching",
    "watch_growth": "memory.leaks",
    "world_size": "ranks",
}

__all__ = [  # found by __getattr__
    "Choice",
    "DeviceMismatch",
    "Ema",
    "HotloopError",
    "Loop",
    "Plan",
    "Report",
    "WarmupCosine",
    "__version__",
    "evaluate",
    "golden_rule",
    "load_weights",
    "measure",
    "metrics",
    "move",
    "pad_to",
    "pick",
    "place",
    "read_weights",
    "release",
    "seed",
    "simulate",
    "stream",
    "survive_oom",
    "to_numpy",
    "usage",
    "waits",
    "watch",
    "watch_growth",
    "world_size",
]


def __getattr__(name: str) -> object:
    if name in ("metrics", "simulate", "waits"):
        return import_module(f"hotloop.{name}")  # of which the last two are called
    if name not in _HOMES:
        raise AttributeError(f"hotloop has no attribute {name!r}; it has {', '.join(__all__)}")
    value: object = getattr(import_module(f"hotloop.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

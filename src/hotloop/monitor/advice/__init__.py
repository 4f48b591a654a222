"""Advice, which is what a monitor is looked at for: rules over readings, each with its evidence."""

from hotloop.monitor.advice.advice import Advice, Moment, Rule
from hotloop.monitor.advice.advisor import Advisor, all_rules
from hotloop.monitor.advice.feeding import Pcie, Starved, Waiting
from hotloop.monitor.advice.host import HostMemory, Swapping
from hotloop.monitor.advice.sharing import IdleMemory, Newcomer, UnusedGpu
from hotloop.monitor.advice.trouble import FailedGpu, MemoryErrors, Slowed

__all__ = [
    "Advice",
    "Advisor",
    "FailedGpu",
    "HostMemory",
    "IdleMemory",
    "MemoryErrors",
    "Moment",
    "Newcomer",
    "Pcie",
    "Rule",
    "Slowed",
    "Starved",
    "Swapping",
    "UnusedGpu",
    "Waiting",
    "all_rules",
]

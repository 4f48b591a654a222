"""Advice, which is what a monitor is looked at for: rules over readings, each with its evidence."""

from hotloop.monitor.advice.advice import Advice as Advice
from hotloop.monitor.advice.advisor import Advisor as Advisor

"""Advice, which is what a monitor is looked at for: rules over readings."""

from hotloop.apps.top.advice.advisor import Advisor as Advisor
from hotloop.apps.top.advice.rule import Advice as Advice

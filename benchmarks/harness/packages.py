"""Packages that only a benchmark needs."""

from importlib import import_module
from typing import Any

from hotloop.errors import HotloopError


class MissingPackage(HotloopError, ImportError):
    """A package that a part of the benchmark needs is not installed."""


def require(package: str) -> Any:
    """The package, or an error with the line that installs it.

    >>> require("no_such_package")
    Traceback (most recent call last):
    harness.packages.MissingPackage: no_such_package is not installed
      fix: pip install no_such_package
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and something that it needs is not
            raise
        raise MissingPackage(f"{package} is not installed", fix=f"pip install {package}") from error

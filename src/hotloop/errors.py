"""Every error that hotloop raises on purpose: what happened, where, and what to do about it."""

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells report it


class HotloopError(Exception):
    """Base of hotloop's own errors. `fix` is the advice alone; the message holds both.

    >>> print(HotloopError("no such class 'sward'", fix="choose one of: gem, sword"))
    no such class 'sward'
      fix: choose one of: gem, sword
    """

    exit_code = 2

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        self.what = what
        self.fix = fix
        super().__init__(what if fix is None else f"{what}\n  fix: {fix}")


class BadArgument(HotloopError, ValueError):
    """A value that cannot be meant: a negative count, a name that does not exist."""


class MissingApplication(HotloopError, AttributeError):
    """A verb or a name of an application that is not installed.

    >>> print(MissingApplication("`hotloop top`", "hotloop.apps.top"))
    `hotloop top` is not here: hotloop.apps.top is not installed
      fix: pip install --force-reinstall --no-deps hotloop
    """

    def __init__(self, name: str, module: str, *, package: str = "hotloop") -> None:  # as `hasattr` needs it
        fix = f"pip install --force-reinstall --no-deps {package}"
        super().__init__(f"{name} is not here: {module} is not installed", fix=fix)


class OutputError(HotloopError, OSError):
    """A file or folder that cannot be written."""


class DeviceUnavailable(HotloopError, RuntimeError):
    """The device that was asked for cannot be used on this machine."""

    exit_code = 3


class DeviceMismatch(HotloopError, RuntimeError):
    """One operation was given tensors that live on different devices."""


class LeftBehind(HotloopError, RuntimeError):
    """A model was moved, and some of its tensors stayed where they were."""


class LeftBehindWarning(UserWarning):
    """The same as `LeftBehind`, where the model may still work."""


class BatchError(HotloopError, RuntimeError):
    """A shape error or dtype error: a batch that the model or the loss does not accept."""


class EmptyLoader(HotloopError, ValueError):
    """A loader that gives no batch at all."""


class LossNotFinite(HotloopError, ArithmeticError):
    """The loss became NaN or infinite; training was stopped."""


class DoesNotFit(HotloopError, MemoryError):
    """What is to be computed is too large for the memory, even one item at a time."""


class MemoryWarning(UserWarning):
    """Memory ran out or is wasted; training goes on, and here is how."""


class PlanWarning(UserWarning):
    """A part of a plan that could not be carried out; training goes on without it."""

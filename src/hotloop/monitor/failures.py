"""What may go wrong between hotloop and a driver, sorted by what is to be done about it."""

from types import MappingProxyType

# NVML's return codes, which are the same in every version; the classes of older bindings are fewer
UNINITIALIZED, NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST = 1, 4, 9, 12, 15
RESET_REQUIRED, LIB_RM_VERSION_MISMATCH, UNKNOWN = 16, 18, 999
INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, VGPU_ECC_NOT_SUPPORTED = 2, 3, 13, 22
FREQUENCY_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, DEPRECATED = 24, 25, 26
INSUFFICIENT_POWER, IRQ_ISSUE, GPU_NOT_FOUND = 8, 11, 28

WORDS = MappingProxyType(
    {
        INSUFFICIENT_POWER: "its power cables are not attached (fix: switch off and attach them)",
        GPU_IS_LOST: "it fell off the bus (fix: restart the machine; if it happens again, look at power and cooling)",
        RESET_REQUIRED: "it must be reset (fix: end what uses it, then run `sudo nvidia-smi --gpu-reset`)",
        UNINITIALIZED: "NVML was closed by another part of this program",
        NO_PERMISSION: "this user may not ask NVIDIA's driver (fix: see who may with `ls -l /dev/nvidia*`)",
        DRIVER_NOT_LOADED: "NVIDIA's driver is installed, but not loaded (fix: `hotloop device` says what is missing)",
        LIBRARY_NOT_FOUND: "there is no NVIDIA driver here (fix: with an NVIDIA GPU, `hotloop device` says what to do)",
        LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated, and the old one is still running"
        " (fix: restart the machine; in a container, restart the container too)",
    }
)


class Failed(Exception):
    """An answer that did not come; one of the four below says what follows from it. Its text is for people."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.code: int | None = getattr(error, "value", None)
        super().__init__(WORDS.get(self.code or 0) or str(error).strip() or type(error).__name__)


class Unsupported(Failed):
    """This driver or GPU does not know the question, and will not know it a moment later."""


class Passing(Failed):
    """No answer this time; the next may come."""


class Lost(Failed):
    """The whole GPU does not answer any more."""


class Dead(Failed):
    """The library itself has gone: it must be started again."""


KINDS: MappingProxyType[int, type[Failed]] = MappingProxyType(
    {
        **dict.fromkeys((UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH), Dead),
        **dict.fromkeys((GPU_IS_LOST, RESET_REQUIRED, INSUFFICIENT_POWER, IRQ_ISSUE, GPU_NOT_FOUND), Lost),
        **dict.fromkeys((NOT_SUPPORTED, INVALID_ARGUMENT, NO_PERMISSION, FUNCTION_NOT_FOUND), Unsupported),
        **dict.fromkeys((VGPU_ECC_NOT_SUPPORTED, FREQUENCY_NOT_SUPPORTED), Unsupported),
        **dict.fromkeys((ARGUMENT_VERSION_MISMATCH, DEPRECATED), Unsupported),
    }
)


def judged(error: Exception) -> Failed:
    """The failure that an exception of the binding amounts to.

    >>> type(judged(AttributeError("an old binding lacks it"))).__name__
    'Unsupported'
    """
    if isinstance(error, AttributeError | TypeError | UnicodeDecodeError):
        return Unsupported(error)
    return KINDS.get(getattr(error, "value", 0), Passing)(error)

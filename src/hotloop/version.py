"""The version of hotloop."""

__version__ = "0.2.0"


def versions() -> dict[str, str]:
    """Those that a record of a run holds."""
    import platform  # noqa: PLC0415  # who asks for one number loads nothing

    import torch  # noqa: PLC0415

    return {"python": platform.python_version(), "torch": str(torch.__version__), "hotloop": __version__}

"""The version of hotloop."""

__version__ = "0.2.0"

"""The version of hotloop."""

__version__ = "0.1.0"

"""The scripts here are run by tests, never imported by pytest, which looks for doctests in every module."""

collect_ignore_glob = ["*/*.py"]

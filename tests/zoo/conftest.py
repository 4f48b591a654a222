"""What the tests of the zoo share. Its scripts run in processes of their own, and are no tests."""

collect_ignore = ["killing.py", "on_cuda.py"]

"""Where the time of training steps went: recorded by `Profiler`, worked out from plain events, kept as a `Profile`."""

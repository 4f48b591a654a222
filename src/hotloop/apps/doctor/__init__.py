"""The doctor: what slows an unmodified script down, by file and line, each fix as a diff with its measured gain."""

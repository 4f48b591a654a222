"""The plan of a run: the course to it, the gate for what rounds, trials of levers, and steps that are undone."""

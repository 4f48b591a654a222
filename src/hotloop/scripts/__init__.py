"""A person's script, run as Python runs it, in a process of its own."""

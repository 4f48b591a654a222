"""Words, units, tables and the terminal."""

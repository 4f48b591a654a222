"""Files written whole or not at all, and private folders."""

"""How Python values are walked, compared, restored and saved."""

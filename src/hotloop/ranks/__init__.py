"""The processes of one run: what they tell one another, and how one that is lost is named."""

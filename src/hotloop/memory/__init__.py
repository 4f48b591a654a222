"""Memory: what is used, by what, and what to do when there is not enough."""

"""Training loops beside one another on the same workloads: what is trained, who trains it, and how fast."""

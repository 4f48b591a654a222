"""What is trained: losses made uniform, what they weigh, and whether the parts of a batch give what the whole gives."""

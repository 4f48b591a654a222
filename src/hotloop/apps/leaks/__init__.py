"""A leak: memory that grows from step to step, the line that made the tensors and the name that holds them."""

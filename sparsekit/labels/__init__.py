"""Which units each element of a tensor belongs to, followed through every operator of a forward pass."""

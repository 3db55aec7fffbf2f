"""Find the units of a model and prove that they can be removed exactly."""

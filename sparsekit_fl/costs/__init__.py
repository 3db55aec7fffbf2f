"""What work costs: simulated seconds, FLOPs by the paper's convention."""

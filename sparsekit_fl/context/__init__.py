"""What policies may look at."""

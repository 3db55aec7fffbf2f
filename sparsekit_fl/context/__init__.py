"""The contexts: what a policy reads, and the memory it writes to."""

"""What one client's work is made of: its context and memory, the loop over batches, messages, costs."""

"""The client's side of a run: context and memory, the loop over batches, messages, costs."""

"""The loop over batches."""

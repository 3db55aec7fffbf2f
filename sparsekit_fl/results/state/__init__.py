"""State that lives from round to round, in memory and on disk."""

"""What can be removed from a model, as data: groups of units, index tables, masks."""

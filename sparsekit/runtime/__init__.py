"""Modules and contexts that a pruned model needs to run: narrow attention, safe convolutions, norms over kept units."""

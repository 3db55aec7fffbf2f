"""Modules and contexts that a cut model runs with: narrow attention, safe convolutions, norms over kept units."""

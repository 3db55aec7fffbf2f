"""Tables and figures, drawn from saved results; nothing here trains."""

"""From labels to unit groups."""

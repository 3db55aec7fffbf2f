"""All that crosses a wire."""

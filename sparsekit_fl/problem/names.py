"""lower_by_name(): what the name of a metric says of its direction. Reports use it, and need no torch for it."""

_LOWER = ("loss", "error", "perplexity")


def lower_by_name(name: str) -> bool:
    """Whether small values of a metric of this name are the good ones: it ends with `loss`, `error` or `perplexity`."""
    return name.endswith(_LOWER)

"""The version, written here and nowhere else; the build reads it too."""

__all__ = ["__version__"]

__version__ = "0.3.0.dev0"

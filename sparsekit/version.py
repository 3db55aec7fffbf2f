"""The version of the package. The build reads it from here."""

__all__ = ["__version__"]

__version__ = "0.3.0.dev0"

"""The version, written here and nowhere else; the build reads it too."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"

"""The version, where a build can read it without importing torch."""

__version__ = "0.1.0"

"""The version of the package, for the modules that write it down."""

__version__ = "0.2.0"

"""The version of the package, alone in a module so that the build can read it without imports."""

__version__ = "0.1.0"

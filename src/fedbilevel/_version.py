"""The version of the package, read by the build, the command line and every message between parties."""

__version__ = "0.1.0"

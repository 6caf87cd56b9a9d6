"""The version of the package, for the build, the command line and messages between parties."""

__version__ = "0.1.0"

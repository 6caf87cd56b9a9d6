"""Runs between peers over a network without a server."""

"""Runs: the loop, its options, files and records."""

"""Oracles: derivatives of many clients at once."""

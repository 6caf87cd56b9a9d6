"""Cleaning of labels across clients: detect, check, report."""

"""Engines: who computes and who talks to whom. An engine never names an algorithm."""

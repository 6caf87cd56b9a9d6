"""fedbilevel: federated bilevel optimisation."""

__version__ = "0.1.0"

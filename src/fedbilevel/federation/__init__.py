"""The vocabulary of algorithms: clients, verbs, networks and the ledger."""

"""What an algorithm may use: clients, verbs, networks and the ledger."""

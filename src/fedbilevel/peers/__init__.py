"""Peers that talk to each other over a network, with no server: keys, messages, who is there, and one peer's part in a run."""

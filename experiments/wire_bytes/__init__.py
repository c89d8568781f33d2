"""Compares the wire bytes of the ledger with what an interface sent."""

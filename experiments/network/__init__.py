"""Compares training over limited links with its prediction."""

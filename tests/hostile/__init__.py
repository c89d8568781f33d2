"""Bytes that nobody meant to send: to payloads, checkpoints and the command line."""

"""Compares training with a sharded optimizer to plain training with bf16."""

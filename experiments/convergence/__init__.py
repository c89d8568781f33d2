"""Compares the quality of training with each scheme to that with bf16."""

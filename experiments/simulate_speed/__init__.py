"""Times predictions."""

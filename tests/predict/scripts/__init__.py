"""Training scripts as others write them: they know nothing of commhooks."""

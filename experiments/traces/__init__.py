"""Records the gradients of small real trainings."""

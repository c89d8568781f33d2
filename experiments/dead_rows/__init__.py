"""Shows what Adam makes of rows of an embedding that no batch has."""

"""Shows how Adam moves rows of an embedding that no batch has."""

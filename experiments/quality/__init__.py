"""Says within which margin each scheme keeps the quality of training with bf16."""

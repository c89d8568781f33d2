"""Plain PyTorch training scripts without commhooks, for the command ``commhooks headroom``."""

"""How ops are declared, checked, compiled and launched."""

"""The command line ``commhooks``; needs rich and typer, which the library does not."""

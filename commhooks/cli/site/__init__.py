"""The folder that ``commhooks headroom`` puts on the path of the processes that it starts."""

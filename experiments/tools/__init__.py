"""Provides what several studies use: tasks, models, processes, hosts, turns, a pretended GPU."""

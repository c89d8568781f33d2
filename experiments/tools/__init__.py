"""What several studies use: tasks and models, processes and hosts, turns, a pretended GPU."""

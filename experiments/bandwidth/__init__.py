"""Measures what each hook saves and costs: trains a task with every hook on Gloo processes."""

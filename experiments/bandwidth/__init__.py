"""What each hook saves and costs: two tasks, trained once per hook on Gloo processes."""

"""Task graphs: tasks, their order and the resources they share; what an engine needs to run them."""

"""What a person at a terminal asks first: help, completion, and whether the installation works."""

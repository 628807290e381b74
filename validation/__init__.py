"""The models held against measured tables and published values, one command each: `python -m validation.<name>`."""

"""Configuration: composed by Hydra from YAML and overrides, checked before anything runs."""

"""Recorded results: one database for all studies, shared by processes and machines."""

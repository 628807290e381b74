"""What several studies share: facts with their sources, variants of an iteration; words are in `studies.plain`."""

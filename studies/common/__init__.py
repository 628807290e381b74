"""Parts that several studies share: facts with sources, variants of an iteration; words are in `studies.plain`."""

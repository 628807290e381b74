"""What several studies share: facts with their sources, words of figures, variants of an iteration."""

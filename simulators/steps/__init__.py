"""Whole iterations of models: their operators from a description, what they cost, and how they follow one another."""

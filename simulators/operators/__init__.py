"""Costs of single operators alone: FLOP, bytes and time on a device, over arrays of shapes and designs."""

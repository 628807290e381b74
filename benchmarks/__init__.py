"""Speed, against peers side by side in one run. Ratios count; absolute times belong to one machine and moment."""

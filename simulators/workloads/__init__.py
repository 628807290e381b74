"""What is computed: operators, models and sequence lengths."""

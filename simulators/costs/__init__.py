"""What an operator or a transfer takes, alone and beside others."""

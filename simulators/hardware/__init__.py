"""What a machine is: GPUs, nodes, fabrics, memory systems and processing in memory."""

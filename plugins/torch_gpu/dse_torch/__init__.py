"""Kernels measured on the GPU of this machine by PyTorch: a backend, and tables that `calibrate` reads."""

BACKENDS = {"torch_gpu": "dse_torch.backend:TorchBackend"}

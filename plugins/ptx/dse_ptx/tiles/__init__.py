"""Kernels of Hopper in PTX, written by Python: bulk copies, mbarriers, clusters and products of warpgroups."""

# Own GEMMs on an own GPU, as README.md shows: its files are in this folder.
python -m dse study=ficco_sweep workload.shapes=my.csv system=my_gpu --config-dir my_conf tracking=none figures=none fidelity=none
python -m dse results robustness study=ficco_sweep samples=2 config_dir=my_conf vary=system.gpu.dma.bytes_per_s=0.2
# expect: qkv .*x \(
# expect: system.gpu.dma.bytes_per_s

# A program of one's own as simulator, on a Dask cluster (docs/how-to/simulator.md, plugins/cluster/README.md).
cp -r "$DSE/docs/examples/allreduce" my_study && cd my_study
python -m dse study=allreduce --config-dir=conf executor=dask executor.jobs=2 tracking=none figures=none
# expect: 64MiB +as fast .*algorithm ring

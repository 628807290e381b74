# Figures of a paper with a schedule of one's own (docs/how-to/knobs.md, docs/how-to/reproduce.md).
mkdir -p my_conf/schedule
cat > my_conf/schedule/mine.yaml <<'YAML'
defaults: [hetero_fused_1d, _self_]
name: mine
description: as hetero_fused_1d, in two chunks
num_chunks: 2
YAML
python -m dse study=ficco_sweep schedule=mine schedule.num_chunks=2 workload.only=[g1] --config-dir my_conf tracking=none fidelity=none figures=paper
test -s outputs/ficco_sweep/latest/figures/speedup.pdf
# expect: mine by DMA, 2 chunks

INFRA_ARGS=(
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 4 # stages
)

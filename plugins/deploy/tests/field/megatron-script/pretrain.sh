#!/bin/bash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
GPUS_PER_NODE=8
NUM_NODES=16
TP=8
PP=4
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=(
    --num-layers 96 
    --hidden-size 12288  # as GPT-3
)
TRAINING_ARGS=(
    --micro-batch-size 1 
    --global-batch-size 1536 
    --bf16
    --recompute-activations
    --overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer
    --fp8-format hybrid
    --num-layers-per-virtual-pipeline-stage 2
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size $TP
	--pipeline-model-parallel-size ${PP}
    --sequence-parallel
    --tp-comm-overlap --tp-comm-overlap-cfg ${CFG_DIR}/ub.yaml
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    "${TRAINING_ARGS[@]}" \
    ${MODEL_PARALLEL_ARGS[@]}

#!/bin/bash
# GPT of 175 billion parameters; change the number of nodes for your system
GPUS_PER_NODE=8
NUM_NODES=1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py --num-layers 96 --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --fp16

#!/bin/bash
# FSDP of Megatron-LM on one node; options of it come behind conditions
GPUS_PER_NODE=8
NUM_NODES=1
USE_MEGATRON_FSDP=${USE_MEGATRON_FSDP:-1}
SHARDING_STRATEGY=${SHARDING_STRATEGY:-"optim_grads_params"}
DTYPE="fp8"
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=128
PROFILE=0

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank ${NODE_RANK:-0}
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO_BATCH_SIZE
    --global-batch-size $GLOBAL_BATCH_SIZE
    --bf16
    --lr 0.00015
)
if [ "${USE_MEGATRON_FSDP}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    TRAINING_ARGS=(
        "${TRAINING_ARGS[@]}"
        --use-megatron-fsdp
        --data-parallel-sharding-strategy ${SHARDING_STRATEGY}
        # --num-distributed-optimizer-instances 2
    )
else
    TRAINING_ARGS+=(--tensor-model-parallel-size 8)
fi
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
elif [[ "$DTYPE" == "fp16" ]]; then
    DTYPE_ARGS+=("--fp16")
fi
[[ $PROFILE -eq 1 ]] && TRAINING_ARGS+=(--profile --recompute-granularity full)
TRAINING_ARGS+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)

CMD="cd /work; torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    --tensor-model-parallel-size 1 \
    ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]}"
srun --container-image=image bash -x -c "${CMD}" 2>&1 | tee log.txt

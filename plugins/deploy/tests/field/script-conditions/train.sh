#!/bin/bash
MODEL=70b
case $MODEL in
  8b) TP=2 ;;
  70b | 70B) TP=8 ;;
esac
ARGS=(--tensor-model-parallel-size $TP --micro-batch-size 2)
[ "$USE_SP" = 1 ] && ARGS+=(--sequence-parallel)
if [ -n "$EP" ]; then
  EXTRA="--expert-model-parallel-size 8"
fi
torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}" $EXTRA

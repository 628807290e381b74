export VLLM_USE_FLASHINFER_MOE_FP8=1
vllm serve deepseek-ai/DeepSeek-V3.1 \
  --trust-remote-code \
  --tensor-parallel-size 8 \
  --enable-expert-parallel

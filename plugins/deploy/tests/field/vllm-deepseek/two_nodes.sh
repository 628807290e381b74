# the second of two nodes has the same line with --headless
docker run --gpus all --ipc=host -e VLLM_ALL2ALL_BACKEND=deepep_low_latency vllm/vllm-openai:latest \
  bash -lc "vllm serve deepseek-ai/DeepSeek-R1 -tp 1 -dp 16 -dpl 8 -dpa 10.0.0.1 -dpp 13345 -ep \
  --kv-cache-dtype fp8 --enable-dbo -cc.pass_config.enable_sp=true --max-num-seqs 256"

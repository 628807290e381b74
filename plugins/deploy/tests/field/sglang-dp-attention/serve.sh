python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention \
   --moe-a2a-backend deepep --enable-two-batch-overlap --trust-remote-code --nnodes 1 --disable-cuda-graph

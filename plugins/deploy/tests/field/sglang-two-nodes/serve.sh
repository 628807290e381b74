# node 0; node 1 has --node-rank 1
python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 16 --dist-init-addr 10.0.0.1:5000 \
  --nnodes 2 --node-rank 0 --trust-remote-code --quantization w8a8_int8 --kv-cache-dtype fp8_e5m2 \
  --speculative-algorithm EAGLE --speculative-num-steps 3 --host 0.0.0.0 --port 40000

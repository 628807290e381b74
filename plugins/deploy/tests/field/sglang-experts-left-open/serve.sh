python -m sglang.launch_server --tp 8 --dp 8 --enable-dp-attention

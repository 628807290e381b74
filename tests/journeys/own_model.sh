# A model of one's own on 64 H100s, to settings of a framework (docs/how-to/plan.md, plugins/deploy/README.md).
cat > config.json <<'JSON'
{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
 "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": false,
 "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-5}
JSON
python -m dse plan model=config.json system=h100_96gb_8 run.mode=training run.batch=128 parallel=auto layouts.gpus=64 \
  layouts.most=1 budget.trials=20 search=random tracking=none figures=none
python -m dse settings export plan=outputs/plan/latest/plan.yaml to=megatron
# expect: 64 GPUs, 128 sequences a step
# expect: written to outputs/export/megatron/: tp_comm_overlap.yaml, megatron_args.txt

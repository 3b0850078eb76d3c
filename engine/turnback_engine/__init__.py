"""vLLM plugin: streamed completions carry ``kv_transfer_params`` before vLLM 0.33 too."""

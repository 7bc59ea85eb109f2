"""GGUF language models on tinygrad's devices: file -> packed weights -> session with a KV cache -> tokens.

What belongs here: the GGUF file (`gguf`) and its matrices on the device (`weights`), model families as data (`arch`,
`families`) and one model's sizes (`config`), the graph (`dequant`, `model`) and its plain float32 reference
(`reference`), the running conversation (`session`, `sampler`), and the two wrappers of libraries (`tokenizer`,
`template` with its `sandbox`). What does not: anything about ioctls, queues or a particular chip.
"""

"""The shipped small model, step by step: corpus, vocabulary, conversations, network, GGUF."""

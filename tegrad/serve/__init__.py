"""HTTP APIs in front of models: OpenAI's, Ollama's and Anthropic's, and a page to chat on."""

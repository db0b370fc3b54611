"""Checkpoints in one GGUF file, as llama.cpp and Ollama use them."""

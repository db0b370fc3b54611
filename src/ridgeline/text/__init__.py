"""Text processing around the model: tokenizer, chat templates, stop strings, reasoning, tool calls, grammars."""

"""Text at the border: tokens and back, chat templates, stop strings, thoughts, tool calls, grammars."""

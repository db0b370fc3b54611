"""Several models in one service, each with an engine process of its own while it is loaded."""

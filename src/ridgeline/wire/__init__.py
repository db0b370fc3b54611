"""The protocol between service and engine process: messages, the service's client and the engine's inbox."""

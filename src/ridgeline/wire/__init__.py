"""The one border between service and engine: messages, the service's client and the engine's inbox."""

"""The OpenAI-compatible server over the engine. It needs `tonnage[serve]`; `serve.server.running` says so."""

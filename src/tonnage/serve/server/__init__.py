"""The OpenAI-compatible server over the engine. Its parts need `tonnage[serve]`; `serve.server.running` says so."""

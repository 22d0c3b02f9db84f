"""Load on an OpenAI-compatible server, ours or another, and what its clients then experience.

Everything is measured from outside, over HTTP, as a client sees it; nothing here knows an engine. httpx and
httpx-sse do the transport; neither torch nor a model is loaded in the measuring process.
"""

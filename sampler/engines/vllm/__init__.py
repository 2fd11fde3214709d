"""vLLM as an engine. What says ``from vllm import`` needs the library; the remote engine uses the rest."""

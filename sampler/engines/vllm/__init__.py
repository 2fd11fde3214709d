"""The vLLM engine. All but its options needs the library, which ``from vllm import`` means here as well."""

"""Drop-in: transformers models, code written for SDPA and code written for flash_attn, unchanged. See docs/integrations.md."""

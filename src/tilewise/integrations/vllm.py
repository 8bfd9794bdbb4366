"""tilewise as vLLM's attention backend `CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins` of an installed tilewise. Nothing changes until a server asks:

    vllm serve model --attention-backend CUSTOM

The backend itself is in `vllm_backend`, which vLLM imports then.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

BACKEND = "tilewise.integrations.vllm_backend.TilewiseBackend"


def register() -> None:
    """Enter the backend as `CUSTOM`. Doing it again changes nothing.

    vLLM's CPU platform knows one backend and ignores the name that is asked for, so it is taught this one.

    >>> register()
    >>> LLM(model, attention_config={"backend": "CUSTOM"})
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    choose = CpuPlatform.get_attn_backend_cls.__func__
    if hasattr(choose, "tilewise"):
        return

    @wraps(choose)
    def chosen(cls: Any, selected_backend: Any, attn_selector_config: Any, *rest: Any, **named: Any) -> str:
        own = selected_backend is AttentionBackendEnum.CUSTOM and selected_backend.get_path() == BACKEND
        if own and not attn_selector_config.use_mla and not attn_selector_config.use_sparse:
            return BACKEND
        path: str = choose(cls, selected_backend, attn_selector_config, *rest, **named)
        return path

    chosen.tilewise = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(chosen)

"""KL per token, from policy and reference log-probs. The only part of the core that needs torch."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as err:
    if err.name != "torch":
        raise
    raise ModuleNotFoundError(
        "kl_guard.tokens needs torch. Install it with: pip install 'kl-guard[torch]'", name=err.name
    ) from err

from kl_guard.tokens.estimators import per_token_kl
from kl_guard.tokens.summary import TokenSummary, summarize_tokens

__all__ = ["TokenSummary", "per_token_kl", "summarize_tokens"]

"""Is a run's tokenizer the one that a model was trained with? Compares the fingerprints in checkpoints. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapipe.errors import CheckpointError
from megapipe.tokenizers.fingerprint import Fingerprint, described, is_same


def check_tokenizer(
    state: Mapping[str, Any],
    own: Fingerprint | None,
    where: str,
    *,
    is_finetuning: bool = False,
    may_differ: bool | None = None,
) -> tuple[str, ...]:
    """Return remarks on how a run's tokenizer differs from that of a checkpoint's state.

    is_finetuning: documents may end with another token. may_differ: --allow-changed-data; None for a command without
    it. Raises CheckpointError for another tokenizer, unless it may differ.
    """
    if own is None or ("tokenizer" in state and state["tokenizer"] is None):
        return ()  # one of the two runs has none
    if "tokenizer" not in state:
        return (f"{where} does not say which tokenizer it was trained with, so it was not compared",)
    saved: Fingerprint = state["tokenizer"]
    try:
        if is_same(saved, own, with_eod=not is_finetuning):
            return ()
        both = f"{described(saved)} in the checkpoint, {described(own)} here"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{where}: its tokenizer cannot be understood: {error!r}") from None
    if may_differ:
        return (f"the tokenizer is not that of {where} (--allow-changed-data): {both}",)
    way = "" if may_differ is None else ", or --allow-changed-data if the change is wanted"
    raise CheckpointError(
        f"the tokenizer is not the one that {where} was trained with: {both}; the same text has other ids. Give that "
        f"tokenizer{way}"
    )

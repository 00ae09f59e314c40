"""What a backend's RuntimeError means to the person who reads it."""

from __future__ import annotations

from megapipe.errors import CommunicationError

TIMED_OUT = ("timed out", "timeout", "time out")
LOST = (
    "closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "connection was closed",
    "remote process",
)


def communication_error(
    what: str, who: str, error: BaseException, waited_seconds: float, timeout_seconds: float | None
) -> CommunicationError:
    """what: operation with its tensor. who: group, or peer, and this rank. Returns the error to raise from `error`."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lowered = str(error).lower()
    if any(word in lowered for word in LOST):
        meaning = "a peer's process has ended; its own message tells why"
    elif any(word in lowered for word in TIMED_OUT):
        limit = "" if timeout_seconds is None else f" of {timeout_seconds:g} s"
        meaning = (
            f"no answer within the time-out{limit}: a peer has died, hangs, or runs another order of operations "
            "(--distributed-timeout-minutes sets the limit)"
        )
    else:
        meaning = "the backend refused it"
    return CommunicationError(
        f"{what} failed on {who} after {waited_seconds:.1f} s: {meaning}. The backend says: {said}"
    )

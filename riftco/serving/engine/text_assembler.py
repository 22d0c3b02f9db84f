"""From the bytes of generated tokens to text to show: whole characters, no beginning of a stop string."""

from codecs import getincrementaldecoder
from collections.abc import Sequence


class TextAssembler:
    """Feeds on the bytes of one token after another and gives the text that is certain by then.

    Undecodable bytes become U+FFFD, as when all are decoded at once. The text ends before the first stop
    string to be completed, the longest of those completed by one character; until then, whatever might be
    the start of one is held back.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """New text after a token's bytes; sets `stopped` if a stop string is complete."""
        return self._extend(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back, once no token follows. Nothing after a stop."""
        text = self._extend(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _extend(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return text
        held, self._held = self._held + text, ""
        ends = [(held.find(stop) + len(stop), -len(stop)) for stop in self._stop if stop in held]
        if ends:
            self.stopped = True
            end, minus_length = min(ends)
            return held[: end + minus_length]
        keep = max(_overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))

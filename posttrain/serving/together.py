"""Several replies at once, as they come."""

import queue
import threading
from collections.abc import Generator, Iterator, Sequence


def together(replies: Sequence[Iterator[str]]) -> Generator[tuple[int, str]]:
    """The pieces of all replies with the number of theirs. Raises the first error of one, when the others are done.

    Closing this closes all replies.
    """
    found: queue.SimpleQueue[tuple[int, str | BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def read(number: int, reply: Iterator[str]) -> None:
        error = None
        try:
            for piece in reply:
                found.put((number, piece))
                if stop.is_set():
                    break
        except BaseException as raised:
            error = raised
        finally:
            close = getattr(reply, "close", None)
            if close is not None:
                close()
            found.put((number, error))

    threads = [threading.Thread(target=read, args=one, daemon=True) for one in enumerate(replies)]
    for thread in threads:
        thread.start()
    left, errors = len(threads), []
    try:
        while left:
            number, piece = found.get()
            if isinstance(piece, str):
                yield number, piece
                continue
            left -= 1
            errors += [piece] if piece is not None else []
    finally:
        stop.set()
    if errors:
        raise errors[0]

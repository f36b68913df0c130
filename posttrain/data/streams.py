"""The unpacked bytes of a data file, by line or whole, with limits against decompression bombs."""

import gzip
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.base.errors import DataError

LINE_BYTES = 64_000_000  # a longer line or document is not parsed
# Largest size of a file that is read whole (JSON, Parquet in gzip), and bytes that are read at a time.
DOCUMENT_BYTES, CHUNK_BYTES = 2_000_000_000, 16_000_000
# A gzip file that unpacks to more than FREE_BYTES may expand at most MOST_EXPANSION times: text expands 3 to 20 times,
# a bomb 1,000 times.
MOST_EXPANSION, FREE_BYTES = 200, 64_000_000
TOO_MUCH = f"unpacks to more than {MOST_EXPANSION} times its size, the limit for {{}}"


def most_unpacked(size: int) -> int:
    """The maximum number of bytes that a file of `size` bytes may unpack to."""
    return max(FREE_BYTES, MOST_EXPANSION * size)


class Unpacked(io.RawIOBase):
    """The content of a gzip file, unpacked while reading. Raises DataError if it expands beyond the limit."""

    def __init__(self, path: Path):
        self.path = path
        self.packed = path.open("rb")
        self.content = gzip.GzipFile(fileobj=self.packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.content.readinto(buffer)
        if self.content.tell() > most_unpacked(self.packed.tell()):
            self.close()
            raise DataError(f"{self.path} {TOO_MUCH.format('gzip')}: unpack it yourself if you trust it")
        return count

    def close(self) -> None:
        self.content.close()
        self.packed.close()
        super().close()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, not unpacked."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def unpacked(path: Path) -> io.BufferedReader:
    """Open a file for reading its bytes; a `.gz` file is unpacked."""
    return io.BufferedReader(Unpacked(path), 2**17) if path.suffix.lower() == ".gz" else path.open("rb")


def whole(path: Path, stream: BinaryIO) -> bytearray:
    """Read the rest of a file that can only be read whole. Raises DataError if it exceeds DOCUMENT_BYTES."""
    content = bytearray()
    too_large = path.stat().st_size > DOCUMENT_BYTES
    while not too_large and (chunk := stream.read(CHUNK_BYTES)):
        content += chunk
        too_large = len(content) > DOCUMENT_BYTES
    if too_large:
        raise DataError(
            f"{path} has more than {DOCUMENT_BYTES:,} bytes and must be read whole: convert it to JSONL, or to Parquet "
            "without gzip, which are read row by row"
        )
    return content


def open_data(path: Path) -> BinaryIO:
    """Open a file as bytes, without UTF-8's byte order mark. Raises DataError for UTF-16, or gzip not named `.gz`."""
    stream = unpacked(path)
    start = stream.peek(4)[:4]
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        stream.close()
        raise DataError(f"{path} is UTF-16, not UTF-8: convert it, e.g. with `iconv -f UTF-16 -t UTF-8`")
    if start[:2] == b"\x1f\x8b":
        stream.close()
        raise DataError(f"{path} is compressed: give it a name that ends in .gz")
    if start[:3] == b"\xef\xbb\xbf":
        stream.read(3)
    return stream


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines with their numbers; None for a line that is too long."""
    number = 0
    while line := stream.readline(LINE_BYTES):
        number += 1
        if len(line) == LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line
